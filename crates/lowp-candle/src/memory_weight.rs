//! A weight held whole in f32 by one process: the baseline, and the reference of tests.

use crate::linear::WeightSource;
use candle_core::{Result, bail};
use lowp_format::Phase;
use std::sync::{Mutex, MutexGuard};

/// An unsharded, unquantized [`WeightSource`]; gradients add up until they are taken.
#[derive(Debug)]
pub struct MemoryWeight {
    rows: usize,
    cols: usize,
    values: Mutex<Vec<f32>>,
    gradient: Mutex<Vec<f32>>,
}

impl MemoryWeight {
    /// A `rows x cols` weight with the given row-major values.
    ///
    /// # Errors
    /// If the number of values is not `rows * cols`.
    pub fn new(rows: usize, cols: usize, values: Vec<f32>) -> Result<Self> {
        if values.len() != rows * cols {
            bail!("{} values for a {rows}x{cols} weight", values.len());
        }
        let gradient = Mutex::new(vec![0.0; values.len()]);
        Ok(Self {
            rows,
            cols,
            values: Mutex::new(values),
            gradient,
        })
    }

    /// Gradient collected since the last call, which is reset to zero.
    ///
    /// # Errors
    /// If a thread panicked while it held the gradient.
    pub fn take_gradient(&self) -> Result<Vec<f32>> {
        let mut gradient = lock(&self.gradient)?;
        let zeros = vec![0.0; gradient.len()];
        Ok(std::mem::replace(&mut *gradient, zeros))
    }

    /// Lets an optimizer change the values in place.
    ///
    /// # Errors
    /// If a thread panicked while it held the values.
    pub fn update(&self, f: impl FnOnce(&mut [f32])) -> Result<()> {
        f(&mut lock(&self.values)?);
        Ok(())
    }
}

impl WeightSource for MemoryWeight {
    fn shape(&self) -> (usize, usize) {
        (self.rows, self.cols)
    }

    fn with_weight(
        &self,
        _phase: Phase,
        use_weight: &mut dyn FnMut(&[f32]) -> Result<()>,
    ) -> Result<()> {
        use_weight(&lock(&self.values)?)
    }

    fn sink_gradient(&self, gradient: Vec<f32>) -> Result<()> {
        let mut sum = lock(&self.gradient)?;
        if gradient.len() != sum.len() {
            bail!("a gradient of {} values for {}", gradient.len(), sum.len());
        }
        sum.iter_mut().zip(&gradient).for_each(|(s, g)| *s += g);
        Ok(())
    }
}

fn lock(values: &Mutex<Vec<f32>>) -> Result<MutexGuard<'_, Vec<f32>>> {
    match values.lock() {
        Ok(guard) => Ok(guard),
        Err(_) => bail!("a thread panicked while it used this weight"),
    }
}
