"""The router: takes HTTP requests and leads each through the pools of roles. Holds no tensors."""
