"""What an answer is worth. In: prompt, answer, the right answer. Out: a reward. Verifiers by name or of the user's
own; those run in worker processes with limits of time and memory."""
