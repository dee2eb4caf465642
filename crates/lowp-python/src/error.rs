//! [`Error`]: errors of the crates below as exceptions of Python, with their text.

use lowp_comm::CommError;
use lowp_file::FileError;
use lowp_format::FormatError;
use lowp_kernels::KernelError;
use lowp_optim::OptimError;
use lowp_shard::ShardError;
use pyo3::PyErr;
use pyo3::exceptions::PyRuntimeError;

pyo3::create_exception!(
    lowp,
    LowpError,
    PyRuntimeError,
    "An error of lowp. The message states the numbers and what to do."
);

/// An error of a crate below, or of Python.
#[derive(Debug)]
pub(crate) enum Error {
    Lowp(String),
    Python(PyErr),
}

impl Error {
    pub(crate) fn new(message: impl Into<String>) -> Self {
        Self::Lowp(message.into())
    }
}

impl std::fmt::Display for Error {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Error::Lowp(message) => f.write_str(message),
            Error::Python(error) => error.fmt(f),
        }
    }
}

impl From<Error> for PyErr {
    fn from(error: Error) -> Self {
        match error {
            Error::Lowp(message) if message.contains("STREAM_CAPTURE") => {
                LowpError::new_err(format!("{message}; {CAPTURES}"))
            }
            Error::Lowp(message) => LowpError::new_err(message),
            Error::Python(error) => error,
        }
    }
}

/// What cannot be in a CUDA graph.
const CAPTURES: &str = "what a stream or a set of addresses needs when it first comes is not made in a capture of a CUDA graph: steps of an \
                        optimizer are captured after one on the same stream, and layers whose weights are lowp tensors stay out of the graph";

impl From<PyErr> for Error {
    fn from(error: PyErr) -> Self {
        Self::Python(error)
    }
}

macro_rules! from {
    ($($Error:ty),*) => {
        $(impl From<$Error> for Error {
            fn from(error: $Error) -> Self {
                Self::Lowp(error.to_string())
            }
        })*
    };
}

from!(CommError, FileError, FormatError, KernelError);

impl From<OptimError> for Error {
    fn from(error: OptimError) -> Self {
        Self::Lowp(match error {
            OptimError::GradientOnSome { .. } => format!("{error}; {UNUSED}"),
            error => error.to_string(),
        })
    }
}

impl From<ShardError> for Error {
    fn from(error: ShardError) -> Self {
        Self::Lowp(match error {
            ShardError::GatherAgain { .. } => format!("{error}; {AHEAD}"),
            error => error.to_string(),
        })
    }
}

/// How FSDP2 gathers before a weight is used.
const AHEAD: &str =
    "with FSDP2 call unshard() after a step, and after values are loaded, not before";

/// How gradients of FSDP2 are on every rank.
const UNUSED: &str =
    "FSDP2 does so after model.set_reduce_scatter_unused_params(True), where PyTorch has it";

#[cfg(feature = "cuda")]
from!(lowp_gemm::GemmError);
