//! [`Buckets`]: the gradients that are reduced together, and how ranks own what is in each bucket.

use super::config::CostConfig;
use super::shapes::{LayerShape, ModelShapes};
use super::vars::Vars;
use super::weight::WeightCost;
use super::weights::Weights;
use lowp_comm::{Adder, GradWire, UnevenRun};
use lowp_format::Recipe;
use lowp_shard::{GRAD_REDUCERS, GradLen, grad_bucket_ranges};
use std::ops::Range;

/// The buckets of a model.
pub(super) struct Buckets<'a> {
    world: usize,
    adder: Adder,
    /// By parameter, in the order of backward.
    costs: Vec<&'a WeightCost>,
    /// The elements of each bucket, in that order.
    pub(super) lens: Vec<usize>,
    /// Buckets of other parameters, each with how many are equal.
    different: Vec<Equal>,
}

/// Equal buckets, by the parameters of the first.
struct Equal {
    params: Range<usize>,
    /// How many of them each communicator reduces.
    counts: [u128; GRAD_REDUCERS],
}

/// Equal buckets.
pub(super) struct Bucket {
    pub(super) count: u128,
    /// How many of them each communicator reduces.
    pub(super) counts: [u128; GRAD_REDUCERS],
    /// The elements of the bucket that ranks own, by gradient.
    pub(super) owned: Vec<Vec<Range<usize>>>,
    /// Those that are reduced in even parts.
    pub(super) runs: Vec<UnevenRun>,
}

impl<'a> Buckets<'a> {
    pub(super) fn new<R: Recipe>(
        model: &ModelShapes,
        weights: &'a Weights<R>,
        vars: &'a Vars,
        config: &CostConfig,
    ) -> Self {
        let weight = |(layer, kind): (&LayerShape, usize)| {
            let block = config.vars.grad_block(layer.block);
            (&weights.kinds[kind].cost, (2 * kind, block))
        };
        let vars = vars.all();
        let kinds: Vec<usize> = vars.kinds_in_order().collect();
        let of_vars = |first: bool| {
            let numbers = vars_in_backward(model, first).into_iter();
            let kinds = numbers.map(|number| kinds[number]);
            kinds.map(|kind| (&vars.kinds[kind].cost, (2 * kind + 1, None)))
        };
        let of_weights = model.layers.iter().zip(weights.kinds_in_order());
        let of_weights: Vec<_> = of_weights.collect();
        let of_weights = of_weights.into_iter().rev().map(weight);
        let params = of_vars(true).chain(of_weights).chain(of_vars(false));
        let (costs, of_params): (Vec<&WeightCost>, Vec<(usize, Option<usize>)>) = params.unzip();
        let kinds: Vec<usize> = of_params.iter().map(|(kind, _)| *kind).collect();
        let grads = grad_lens(model).into_iter().zip(&costs).zip(&of_params);
        let grads = grads.map(|((len, cost), &(_, block))| GradLen {
            len,
            block: block.filter(|_| !cost.has_even_elements()),
        });
        let grads: Vec<GradLen> = grads.collect();
        let (mut different, mut lens): (Vec<Equal>, _) = (Vec::new(), Vec::new());
        let buckets = grad_bucket_ranges(&grads, most_in_bucket(config));
        for (number, bucket) in buckets.into_iter().enumerate() {
            lens.push(grads[bucket.clone()].iter().map(|grad| grad.len).sum());
            let same = |known: &&mut Equal| kinds[known.params.clone()] == kinds[bucket.clone()];
            let mut counts = [0; GRAD_REDUCERS];
            counts[number % GRAD_REDUCERS] = 1;
            match different.iter_mut().find(same) {
                Some(known) => known.counts[number % GRAD_REDUCERS] += 1,
                None => different.push(Equal {
                    params: bucket,
                    counts,
                }),
            }
        }
        Self {
            world: config.mesh.shard,
            adder: adder(config),
            costs,
            lens,
            different,
        }
    }

    /// Who adds the gradients on devices.
    pub(super) fn adder(&self) -> Adder {
        self.adder
    }

    /// Those that differ, as devices reduce them.
    pub(super) fn each(&self) -> impl Iterator<Item = Bucket> {
        self.different.iter().map(|Equal { params, counts }| {
            let mut end = 0;
            let mut next = |&len: &u64| {
                end += len as usize;
                end - len as usize..end
            };
            let costs = self.costs[params.clone()].iter();
            let owned = costs.map(|cost| cost.elements.iter().map(&mut next).collect());
            let owned: Vec<Vec<Range<usize>>> = owned.collect();
            let batch: Vec<_> = owned.iter().map(|ranges| ((), ranges.as_slice())).collect();
            Bucket {
                count: counts.iter().sum(),
                counts: *counts,
                runs: UnevenRun::find(&batch, self.world, self.adder()),
                owned,
            }
        })
    }
}

fn adder(config: &CostConfig) -> Adder {
    match config.grad_wire {
        _ if config.peer_reads && config.mesh.shard > 1 => Adder::Reader,
        GradWire::F32 => Adder::Library,
        GradWire::Bf16 => Adder::Receiver,
    }
}

/// Elements of the parameters, in the order of backward.
fn grad_lens(model: &ModelShapes) -> Vec<usize> {
    let layers = model.layers.iter().rev().map(|layer| layer.shape);
    let vars = |first: bool| {
        let numbers = vars_in_backward(model, first).into_iter();
        numbers.map(|number| model.vars[number].shape)
    };
    let shapes = vars(true).chain(layers).chain(vars(false));
    shapes.map(|shape| shape.elements()).collect()
}

/// The numbers of variables whose gradients come before those of layers, or of the others.
fn vars_in_backward(model: &ModelShapes, first: bool) -> Vec<usize> {
    let is_first = |number: &usize| model.vars[*number].used.is_first_in_backward() == first;
    (0..model.vars.len()).filter(is_first).collect()
}

/// The most elements that share a bucket.
pub(super) fn most_in_bucket(config: &CostConfig) -> usize {
    config.vars.grad_bucket() / size_of::<f32>()
}
