"""The side of the agent: the port `Workers`, carried out by a keeper."""
