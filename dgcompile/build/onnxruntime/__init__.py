"""The engine stage of the cpu target: the traced graphs rewritten for ONNX Runtime, and tried."""
