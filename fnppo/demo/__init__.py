"""`fnppo demo`: a pretrained language model learns one-digit arithmetic, on a CPU, through the public pure functions.

Read `fnppo.demo.run`; the task, the loading of models and the report are beside it.
"""
