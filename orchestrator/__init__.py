"""The driver: who does what, and when. The top storey.

cli, commands, config        what a user types; `config` composes the sections of all storeys
options, checks              from files and flags to a configuration that can run, before anything starts
resume                       what every slot and the data continue from
running, placement           a run and its gangs, from start to end, in a Ray cluster
loops                        the algorithm: generate, train, publish, save
train_group, publish, fleet  the gang, the engines, and where they meet
rollout_manager, rollouts    prompts to judged samples; `data`, `rewards`, `filters` are what it is made of
dispatch, batching           who trains on which samples
tracking, inspector          what is told to people
jobs, kuberay                a run on somebody else's machines
"""
