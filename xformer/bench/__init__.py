"""Speed and memory of attention: what each variant costs at each length, and benchmarks against other packages."""
