//! The baseline's engine: whole f32 weights on every rank, gradients summed, AdamW.

use super::config::Config;
use super::engine::{Accounting, Engine};
use super::exchange::Exchange;
use super::run::threads_per_rank;
use anyhow::{Context, Result};
use candle_core::backprop::GradStore;
use candle_core::{Tensor, Var};
use lowp_candle::{Linear, MemoryWeight, QuantLinear};
use std::sync::Arc;

const BETA1: f32 = 0.9;
const BETA2: f32 = 0.95;
const EPSILON: f32 = 1e-8;

/// One rank of the baseline.
#[derive(Debug)]
pub(crate) struct Plain<'a> {
    config: &'a Config,
    exchange: Exchange,
    weights: Vec<Arc<MemoryWeight>>,
    /// Values of the candle variables, then both moments of everything; linear layers first.
    vars: Vec<Vec<f32>>,
    moments: Vec<[Vec<f32>; 2]>,
    decay: Vec<bool>,
}

impl<'a> Plain<'a> {
    /// A rank that talks to the others through `exchange`.
    pub(crate) fn new(config: &'a Config, exchange: Exchange) -> Self {
        Self {
            config,
            exchange,
            weights: Vec::new(),
            vars: Vec::new(),
            moments: Vec::new(),
            decay: Vec::new(),
        }
    }
}

impl Engine for Plain<'_> {
    fn linears(&mut self) -> Result<Vec<Box<dyn Linear>>> {
        let threads = threads_per_rank(self.config.mesh.ranks());
        let mut layers: Vec<Box<dyn Linear>> = Vec::new();
        for (spec, number) in self.config.model.linears().iter().zip(0..) {
            let count = spec.rows * spec.cols;
            let values = spec.init.values(self.config.seed, number, 0..count);
            let weight = Arc::new(MemoryWeight::new(spec.rows, spec.cols, values)?);
            layers.push(Box::new(QuantLinear::new(weight.clone(), threads)));
            self.weights.push(weight);
            self.moments.push([vec![0.0; count], vec![0.0; count]]);
            self.decay.push(true);
        }
        for spec in self.config.model.vars() {
            let count = spec.shape.iter().product();
            self.moments.push([vec![0.0; count], vec![0.0; count]]);
            self.decay.push(spec.decay);
        }
        Ok(layers)
    }

    fn finish_step(&mut self, step: usize, vars: &[Var], gradients: &GradStore) -> Result<()> {
        let mut packed = Vec::new();
        for weight in &self.weights {
            packed.extend(weight.take_gradient()?);
        }
        for var in vars {
            let gradient = gradients.get(var).context("a variable without gradient")?;
            packed.extend(gradient.flatten_all()?.to_vec1::<f32>()?);
        }
        let packed = self.exchange.sum(packed)?;
        let norm = packed
            .iter()
            .map(|&g| f64::from(g) * f64::from(g))
            .sum::<f64>()
            .sqrt();
        #[allow(clippy::cast_possible_truncation)]
        // host scalars are computed in f64 and rounded once
        let adam = Adam {
            rate: self.config.schedule.rate(step) as f32,
            scale: (f64::from(self.config.clip) / norm).min(1.0) as f32,
            correction1: (1.0 - f64::from(BETA1).powf((step + 1) as f64)) as f32,
            correction2: (1.0 - f64::from(BETA2).powf((step + 1) as f64)) as f32,
        };
        if self.vars.is_empty() {
            for var in vars {
                self.vars.push(var.flatten_all()?.to_vec1()?);
            }
        }
        let mut rest = packed.as_slice();
        for (index, moments) in self.moments.iter_mut().enumerate() {
            let (gradient, tail) = rest.split_at(moments[0].len());
            rest = tail;
            let decay = if self.decay[index] {
                self.config.weight_decay
            } else {
                0.0
            };
            match self.weights.get(index) {
                Some(weight) => weight.update(|w| adam.update(w, gradient, moments, decay))?,
                None => {
                    let index = index - self.weights.len();
                    adam.update(&mut self.vars[index], gradient, moments, decay);
                    let var = &vars[index];
                    var.set(&Tensor::from_slice(
                        &self.vars[index],
                        var.shape(),
                        var.device(),
                    )?)?;
                }
            }
        }
        Ok(())
    }

    fn sum(&mut self, value: f64) -> Result<f64> {
        self.exchange.sum_one(value)
    }

    fn accounting(&mut self) -> Result<Accounting> {
        let linears = self.config.model.linears();
        let parameters: usize = linears.iter().map(|l| l.rows * l.cols).sum();
        Ok(Accounting {
            resident_weight_bytes: (4 * parameters * self.config.mesh.ranks()) as u64,
            ..Accounting::default()
        })
    }
}

struct Adam {
    rate: f32,
    /// What clipping multiplies every gradient by.
    scale: f32,
    correction1: f32,
    correction2: f32,
}

impl Adam {
    fn update(&self, p: &mut [f32], g: &[f32], [m, v]: &mut [Vec<f32>; 2], decay: f32) {
        for i in 0..p.len() {
            let g = g[i] * self.scale;
            m[i] = BETA1 * m[i] + (1.0 - BETA1) * g;
            v[i] = BETA2 * v[i] + (1.0 - BETA2) * g * g;
            let denominator = (v[i] / self.correction2).sqrt() + EPSILON;
            let update = m[i] / self.correction1 / denominator + decay * p[i];
            p[i] -= self.rate * update;
        }
    }
}
