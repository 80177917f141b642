"""A rank's measurements."""

from fugaku_megatron.calibration.calibrate import Compute


def rank(ghz: float = 3.0) -> Compute:
    return Compute(
        threads=2,
        clock_ghz=ghz,
        fma_gflops=100.0,
        int8_gops=300.0,
        triad_gbs=20.0,
        gemm={"fp32": ((256, 70.0), (1024, 85.0)), "int8": ((256, 150.0), (1024, 240.0))},
        attention=((512, 40.0, 30.0), (2048, 64.0, 48.0)),
        dropout_flops=90.0,
        elementwise_gbs=15.0,
        call_us=7.0,
        iteration_s=0.01,
        process_mib=250.0,
        bf16x3=0.4,
    )
