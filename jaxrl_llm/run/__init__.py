"""One run. In: a ConfigDict. Out: `Settings` whose blocks agree with one another, the compiled functions made of them
(assembly.py), and a DIR that the training loop (trainer.py) fills step by step or resumes."""
