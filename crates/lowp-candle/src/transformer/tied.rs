//! [`TiedHead`]: a head that is the embedding.

use candle_core::{Result, bail};
use lowp_format::Phase;
use std::sync::{Arc, Mutex};

use crate::WeightSource;

/// The embedding as a head, whose gradient waits for that of the embedding.
#[derive(Debug)]
pub(super) struct TiedHead {
    embedding: Arc<dyn WeightSource>,
    gradient: Mutex<Option<Vec<f32>>>,
}

impl TiedHead {
    pub(super) fn new(embedding: &Arc<dyn WeightSource>) -> Self {
        Self {
            embedding: Arc::clone(embedding),
            gradient: Mutex::default(),
        }
    }

    /// The gradient that backward left.
    ///
    /// # Errors
    /// There is none.
    pub(super) fn take_gradient(&self) -> Result<Vec<f32>> {
        match self.gradient.lock().ok().and_then(|mut g| g.take()) {
            Some(gradient) => Ok(gradient),
            None => bail!("the head got no gradient"),
        }
    }
}

impl WeightSource for TiedHead {
    fn shape(&self) -> (usize, usize) {
        self.embedding.shape()
    }

    fn with_weight(
        &self,
        phase: Phase,
        use_weight: &mut dyn FnMut(&[f32]) -> Result<()>,
    ) -> Result<()> {
        self.embedding.with_weight(phase, use_weight)
    }

    fn sink_gradient(&self, gradient: Vec<f32>) -> Result<()> {
        match self.gradient.lock() {
            Ok(mut held) => *held = Some(gradient),
            Err(_) => bail!("a thread panicked while it used the head"),
        }
        Ok(())
    }
}
