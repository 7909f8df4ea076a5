"""llama.cpp: GGUF files, one host architecture per family, run through its C library in a child process."""
