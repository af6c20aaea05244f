"""Tasks of several turns. In: the answers of a policy, one a turn. Out: observations, rewards, and whether an episode
is over. Environments of a task's own run in this process, others in processes of their own: docs/environments.md."""
