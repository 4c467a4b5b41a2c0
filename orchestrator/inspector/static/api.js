// What the page asks the server for.

export async function json(path, parameters = {}, signal) {
  const answer = await fetch(`${path}?${new URLSearchParams(parameters)}`, { signal });
  if (!answer.ok) throw new Problem(answer.status, (await answer.text()).trim());
  return answer.json();
}

/** A window of lanes: the JSON header, and `cells`, three bytes for each column of each lane (see raster.py). */
export async function picture(parameters, signal) {
  const answer = await fetch(`/api/window?${new URLSearchParams(parameters)}`, { signal });
  if (!answer.ok) throw new Problem(answer.status, (await answer.text()).trim());
  const bytes = await answer.arrayBuffer();
  const length = new DataView(bytes).getUint32(0, true);
  const header = JSON.parse(new TextDecoder().decode(new Uint8Array(bytes, 4, length)));
  return { ...header, cells: new Uint8Array(bytes, 4 + length) };
}

export class Problem extends Error {
  constructor(status, text) {
    super(text);
    this.status = status;
  }
}
