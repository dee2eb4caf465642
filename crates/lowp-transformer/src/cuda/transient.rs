//! [`Transient`]: an embedding or a head, whose f32 values are on the GPU while they are read.

use std::sync::Arc;

use lowp_format::{Phase, Recipe};
use lowp_fsdp::{ShardedModel, VarWeight};
use lowp_kernels::{Cuda, CudaBuffer};

use super::TransformerError;
use super::linear::Shared;
use super::trace::VAR_GATHERS;

type Done<T = ()> = Result<T, TransformerError>;

/// A variable that is gathered for each use.
#[derive(Debug)]
pub(super) struct Transient {
    /// Its number in the model.
    pub(super) index: usize,
    weight: Arc<VarWeight<Cuda>>,
    shared: Arc<Shared>,
}

impl Transient {
    /// Variable `index` of `model`.
    pub(super) fn new<R: Recipe>(
        shared: &Arc<Shared>,
        model: &ShardedModel<Cuda, R>,
        index: usize,
    ) -> Done<Self> {
        let weight = model.transient_var(index).ok_or_else(|| {
            let why = format!("variable {index} of the model is not gathered for each use");
            TransformerError::Unsupported(why)
        })?;
        Ok(Self {
            index,
            weight: Arc::clone(weight),
            shared: Arc::clone(shared),
        })
    }

    /// How many writes of it began ([`ShardedWeight::version`](lowp_fsdp::ShardedWeight::version)).
    pub(super) fn version(&self) -> Done<Option<u64>> {
        Ok(self.weight.version()?)
    }

    /// Starts its gather.
    pub(super) fn prefetch(&self) -> Done {
        match self.shared.prefetch {
            true => Ok(self.weight.prefetch(Phase::Forward)?),
            false => Ok(()),
        }
    }

    /// Gathers it and gives its f32 values to `enqueue`, which gives the stream what reads them.
    pub(super) fn with_values(&self, enqueue: impl FnOnce(&CudaBuffer<u8>) -> Done) -> Done {
        self.weight.with_gathered(Phase::Forward, |tensor, _| {
            self.shared.trace.mark(|| VAR_GATHERS.to_owned())?;
            let [buffer] = tensor.buffers() else {
                let why = format!("{} buffers of a variable", tensor.buffers().len());
                return Err(TransformerError::Unsupported(why));
            };
            enqueue(&buffer.storage)
        })
    }
}
