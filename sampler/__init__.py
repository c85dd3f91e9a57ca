"""The vLLM engine that writes rollouts, with expert layers computed under an execution spec."""
