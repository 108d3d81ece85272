"""Tasks of middleware, cut into nodes that run on one machine or several. It knows no reinforcement learning."""
