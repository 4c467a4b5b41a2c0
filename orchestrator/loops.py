"""The training loop.

        data -> RolloutManager: engines generate -> reward -> samples, sharded by data-parallel rank
                  ^                                                    |  (object references only)
                  |                                                    v
        publish(actor@k+1)  <-  save, every so often  <-  TrainGroup: ref log-probs, advantages, optimizer steps -> k+1

Back-pressure: `sync` generates rollout k+1 only once k is trained on. `async` keeps exactly one rollout ahead: it
starts generating k+1 when it starts training on k. A publish waits until that generation has ended, so every sample
has one behaviour version; so does a save, so that a resumed run trains on the very samples this one would have.
`fully_async` asks for rollouts as `sync` does, but what it gets was generated meanwhile: the manager begins prompts
whenever staleness allows (`rollouts/group_stream.py`), and neither publish nor save waits for them.
"""

from __future__ import annotations

from typing import Any, Protocol

from orchestrator.batching import num_rollouts
from orchestrator.config import Config
from orchestrator.running.interrupts import StopAsked
from state.checkpoints import iteration_dir


class Run(Protocol):
    """The verbs of a run, as the loop needs them. What `generate` returns is a rollout that is being generated."""

    def generate(self, rollout_id: int) -> Any:
        """Start generating; does not wait."""

    def wait(self, rollout: Any) -> None:
        """Return once it has been generated and scored. Raises `StopAsked` when the run is asked to end."""

    def train(self, rollout: Any) -> None: ...

    def save(self, rollout_id: int) -> None:
        """Save what was trained. In the background: what was saved before is complete when this returns."""

    def finish_saves(self) -> None:
        """Return once every save is complete."""

    def export(self, rollout_id: int) -> None:
        """Write the actor as a Hugging Face directory."""

    def publish(self) -> None: ...

    def confirm_resume(self) -> None:
        """Return once what was resumed is found to be what was saved, as far as anybody asks. Raises `ResumeError`."""

    def evaluate(self, rollout_id: int) -> None:
        """Measure the published weights, with `rollout_id` rollouts trained."""

    def report(self, rollout_id: int) -> None:
        """What was measured since the last report."""

    def may_stop(self) -> None:
        """Raise `StopAsked` if the run was asked to end, and what a save in the background has failed of."""


def train_loop(run: Run, config: Config, start: int) -> None:
    """Rollouts `start` to `loop.num_rollout - 1`. Publishes before the first, and evaluates; saves after the last.

    A rollout is reported and exported before it is saved, so that what a checkpoint continues from has been; and saved
    before it is evaluated, so that an evaluation costs no checkpoint. Asked to end, the run saves what it has trained.
    However it ends but for a kill, a save that was begun is complete, or its failure is told.
    """
    end, ahead = num_rollouts(config), config.loop.mode == "async"
    trained = saved = start - 1
    try:
        run.confirm_resume()
        run.publish()
        if config.eval.interval:
            run.evaluate(start)
        following = None
        for rollout_id in range(start, end):
            rollout = following or run.generate(rollout_id)
            run.wait(rollout)
            following = run.generate(rollout_id + 1) if ahead and rollout_id + 1 < end else None
            run.train(rollout)
            run.report(rollout_id)
            trained = rollout_id
            run.may_stop()
            if _due(config.checkpoint.save_hf_interval, rollout_id, end):
                run.export(rollout_id)
            if _due(config.checkpoint.save_interval, rollout_id, end):
                if following:
                    run.wait(following)
                run.save(rollout_id)
                saved = rollout_id
            if _due(config.loop.update_weights_interval, rollout_id, end):
                if following:
                    run.wait(following)
                run.publish()
            if _due(config.eval.interval, rollout_id, end):
                run.evaluate(rollout_id + 1)
        run.finish_saves()
    except StopAsked as stop:
        if config.checkpoint.save_interval is None or trained < start:
            raise
        if saved < trained:
            # What is still being generated is not waited for: its prompts come again.
            run.save(trained)
        run.finish_saves()
        name = iteration_dir("", trained).name
        raise StopAsked(f"{stop}; saved as {name}, from where the same command continues") from None
    except Exception as error:
        try:
            run.finish_saves()
        except Exception as lost:
            error.add_note(f"the save that was under way is lost with it: {lost}")
        raise


def _due(interval: int | None, rollout_id: int, end: int) -> bool:
    """Whether something done every `interval` rollouts, and after the last, is due after this one."""
    return interval is not None and ((rollout_id + 1) % interval == 0 or rollout_id + 1 == end)
