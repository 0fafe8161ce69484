"""The rules of the policy grammar, one file each: facts in, plans out. They know no tensors and no decode loop."""
