//! [`Transformer`] as a [`Network`] of tokens.

use lowp_format::spelling::Variant;
use lowp_fsdp::VarPlace;
use lowp_kernels::Cuda;
use lowp_train::Batch;
use lowp_train::Network;
use lowp_train::network::{DeviceMemory, LateLoss, NetworkResult, Profile, Sharded};

use super::TransformerError;
use super::batch::Tokens;
use super::model::Transformer;
use super::trace::GATHERS;
use crate::places::CudnnPasses;

impl Network<Cuda> for Transformer<Variant> {
    type Batch = Batch;

    const VARS: VarPlace = VarPlace::Backend;

    fn train(
        &mut self,
        sharded: &mut Sharded<Cuda>,
        batch: &Batch,
        divisor: usize,
    ) -> NetworkResult<f64> {
        let tokens = Tokens {
            inputs: &batch.inputs,
            targets: &batch.targets,
            first_seen: batch.first_seen.as_deref(),
        };
        Transformer::train(self, sharded, tokens, divisor)?;
        sharded.finish_micro_batch()?;
        Ok(0.0)
    }

    fn evaluate(
        &mut self,
        _: &mut Sharded<Cuda>,
        batch: &Batch,
        divisor: usize,
    ) -> NetworkResult<f64> {
        let Batch {
            inputs,
            targets,
            first_seen,
        } = batch;
        let at_once = self.tokens();
        let mut seen = first_seen.iter().flat_map(|seen| seen.chunks(at_once));
        for (inputs, targets) in inputs.chunks(at_once).zip(targets.chunks(at_once)) {
            let tokens = Tokens {
                inputs,
                targets,
                first_seen: seen.next(),
            };
            Transformer::evaluate(self, tokens, divisor)?;
        }
        Ok(0.0)
    }

    fn take_loss(&mut self) -> NetworkResult<f64> {
        Ok(Transformer::take_loss(self)?)
    }

    fn start_loss(&mut self) -> NetworkResult<LateLoss> {
        let loss = Transformer::start_loss(self)?;
        Ok(Box::new(move || {
            let loss = loss.wait().map_err(TransformerError::from)?;
            Ok(loss.first().copied().map_or(f64::NAN, f64::from))
        }))
    }

    fn z_loss(&self) -> f32 {
        Transformer::z_loss(self)
    }

    /// The place of a rank's tokens in a micro-batch is the same in all of them.
    fn random_step(step: usize, micro: usize, accumulate: usize) -> u64 {
        (step * accumulate + micro) as u64
    }

    fn ways(&self) -> String {
        let ways = match self.attention().0 {
            CudnnPasses::None => "as products",
            CudnnPasses::Forward => "by cuDNN, backward as products",
            CudnnPasses::Both => "by cuDNN",
            CudnnPasses::AnyOrder => "by cuDNN, not deterministic",
        };
        ways.to_owned()
    }

    fn measure_memory(cuda: &Cuda) -> NetworkResult {
        Ok(cuda.reset_peak_memory()?)
    }

    fn memory(&self, cuda: &Cuda) -> NetworkResult<Option<DeviceMemory>> {
        Ok(Some(DeviceMemory {
            network: self.bytes(),
            peak: cuda.peak_memory()?,
        }))
    }

    fn start_profile(&self) -> NetworkResult {
        Ok(Transformer::start_profile(self)?)
    }

    fn take_profile(&self) -> NetworkResult<Option<Profile>> {
        let profile = Transformer::take_profile(self)?;
        let gathers = profile.spent.iter().filter(|spent| spent.what == GATHERS);
        Ok(Some(Profile {
            waited: gathers.map(|spent| spent.milliseconds / 1e3).sum(),
            gathered: profile
                .gathers
                .map(|of| [of.milliseconds / 1e3, of.hidden / 1e3]),
            spent: profile.spent,
        }))
    }
}
