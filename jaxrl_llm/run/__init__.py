"""One run. In: a ConfigDict. Out: `Settings` that agree, the compiled functions made from them, and a DIR that the
training loop fills step by step or resumes."""
