(module (memory 1))
