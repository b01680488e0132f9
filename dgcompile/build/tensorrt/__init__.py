"""The engine stage of GPU targets: TensorRT-RTX (``tensorrt_rtx``) and TensorRT (``tensorrt``), by the same code.

graph.py      the traced graph -> what the library's parser is given, and the table of the engine's tensors
worker.py     one engine, in a process of its own
engines.py    both engines: starts the workers and follows them
libraries.py  what is installed, and the environment of a worker
"""
