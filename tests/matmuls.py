"""Names of the kernels that multiply matrices, for tests that observe or change their calls. Imports nothing: memory is measured."""

MATMULS = (
    "linear_forward",
    "linear_data_gradient",
    "linear_weight_gradient",
    "grouped_linear_forward",
    "grouped_linear_data_gradient",
    "grouped_linear_weight_gradient",
)
