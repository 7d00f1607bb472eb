"""Ops that are computed whole, and why."""

from __future__ import annotations

from tfcluster.runtime.partition.rules.table import whole

whole(
    "it changes or reads state that all ranks have alike",
    *("AssignVariableOp", "AssignAddVariableOp", "AssignSubVariableOp"),
    *("ResourceScatterAdd", "ResourceScatterSub", "ResourceScatterUpdate"),
    *("ReadVariableOp", "VarHandleOp", "VariableShape", "VarIsInitializedOp"),
)
whole(
    "it runs a program's own code on the host",
    *("PyFunc", "EagerPyFunc", "PyFuncStateless"),
)
whole("it has an effect", "PrintV2", "Print", "Assert")
whole("it depends on no data", "Const", "Placeholder", "Range", "LinSpace")
