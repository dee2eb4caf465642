//! [`transients`]: variables that are gathered for each use, as layers of a CPU read them.

use std::sync::Arc;

use candle_core::{Error, Result};
use lowp_comm::{Communicator, or_abort};
use lowp_format::{Phase, Recipe};
use lowp_fsdp::{ShardedModel, VarWeight};
use lowp_kernels::Cpu;

use crate::error::CandleError;
use crate::linear::WeightSource;

/// The variables of `model` that are gathered for each use ([`lowp_fsdp::VarUse`]), in the order of their specs. They are read where they
/// are gathered, without a copy.
pub fn transients<R: Recipe>(model: &ShardedModel<Cpu, R>) -> Vec<Arc<dyn WeightSource>> {
    let vars = (0..model.var_shapes().len()).filter_map(|index| model.transient_var(index));
    let transient = |weight: &Arc<VarWeight<Cpu>>| {
        Arc::new(Transient {
            weight: Arc::clone(weight),
            world: Arc::clone(&model.mesh().world),
        }) as Arc<dyn WeightSource>
    };
    vars.map(transient).collect()
}

#[derive(Debug)]
struct Transient {
    weight: Arc<VarWeight<Cpu>>,
    world: Arc<dyn Communicator<Cpu>>,
}

impl WeightSource for Transient {
    fn shape(&self) -> (usize, usize) {
        let shape = self.weight.full_shape();
        (shape.rows, shape.cols)
    }

    fn with_weight(
        &self,
        _: Phase,
        use_weight: &mut dyn FnMut(&[f32]) -> Result<()>,
    ) -> Result<()> {
        let used = self.weight.with_gathered(Phase::Forward, |tensor, _| {
            let [buffer] = tensor.buffers() else {
                let why = format!("{} buffers of a variable", tensor.buffers().len());
                return Err(Error::Msg(why).into());
            };
            let bytes = buffer.storage.read()?;
            match bytemuck::try_cast_slice(&bytes) {
                Ok(values) if cfg!(target_endian = "little") => Ok(use_weight(values)?),
                _ => {
                    let address = bytes.as_ptr().addr();
                    let why = format!(
                        "f32 values at {address:#x} are not read where they were gathered: that takes a multiple of 4, and a \
                         little-endian machine"
                    );
                    Err(CandleError::from(Error::Msg(why)))
                }
            }
        });
        Ok(or_abort(&*self.world, used)?)
    }

    fn sink_gradient(&self, gradient: Vec<f32>) -> Result<()> {
        self.weight.add_gradient(&gradient).map_err(Error::wrap)
    }
}
