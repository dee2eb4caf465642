//! Every custom operation's analytic gradient against central differences, and the whole model against itself split.

use super::super::Gpt;
use super::super::ops::{
    CausalAttention, Gelu, HeadLoss, LayerNorm, LossOptions, Positions, RmsNorm, Rotary, Seen,
    SwiGlu, add_rows, embed,
};
use super::dense::Dense;
use crate::{Linear, MemoryWeight, QuantLinear, WeightSource};
use candle_core::{CpuStorage, CustomOp1, CustomOp2, Device, Layout, Result, Shape, Tensor, Var};
use lowp_shard::Init;
use lowp_train::Batch;
use lowp_train::Model;
use lowp_transformer::{Arch, GptConfig, Rope};
use std::sync::Arc;

fn var(shape: &[usize], number: u64) -> Result<Var> {
    let count: usize = shape.iter().product();
    let values = Init::Normal(1.0).rows(9, number, 0..1, count);
    Var::from_vec(values, shape, &Device::Cpu)
}

/// A scalar that weighs every output differently.
fn weighted(y: &Tensor) -> Result<Tensor> {
    let weights = var(y.dims(), 77)?;
    (y * weights.as_tensor())?.sum_all()
}

fn check(vars: &[Var], f: impl Fn() -> Result<Tensor>) -> Result<()> {
    const STEP: f32 = 1e-2;
    let gradients = f()?.backward()?;
    for (which, v) in vars.iter().enumerate() {
        let Some(gradient) = gradients.get(v) else {
            candle_core::bail!("operand {which} got no gradient");
        };
        let gradient = gradient.flatten_all()?.to_vec1::<f32>()?;
        let values = v.flatten_all()?.to_vec1::<f32>()?;
        for i in 0..values.len() {
            let at = |delta: f32| -> Result<f64> {
                let mut moved = values.clone();
                moved[i] += delta;
                v.set(&Tensor::from_vec(moved, v.shape(), v.device())?)?;
                Ok(f64::from(f()?.to_scalar::<f32>()?))
            };
            let slope = (at(STEP)? - at(-STEP)?) / f64::from(2.0 * STEP);
            at(0.0)?;
            let error = (slope - f64::from(gradient[i])).abs();
            assert!(
                error < 5e-3 * (1.0 + slope.abs()),
                "operand {which}, element {i}: {} for a slope of {slope}",
                gradient[i]
            );
        }
    }
    Ok(())
}

#[test]
fn gelu() -> Result<()> {
    let x = var(&[3, 7], 0)?;
    check(std::slice::from_ref(&x), || weighted(&x.apply_op1(Gelu)?))
}

#[test]
fn layer_norm() -> Result<()> {
    let (x, gamma, beta) = (var(&[3, 11], 0)?, var(&[11], 1)?, var(&[11], 2)?);
    check(&[x.clone(), gamma.clone(), beta.clone()], || {
        weighted(&x.apply_op3(&gamma, &beta, LayerNorm::default())?)
    })
}

#[test]
fn rms_norm() -> Result<()> {
    let (x, gamma) = (var(&[3, 11], 0)?, var(&[11], 1)?);
    check(&[x.clone(), gamma.clone()], || {
        weighted(&x.apply_op2(&gamma, RmsNorm::new(1e-5))?)
    })
}

#[test]
fn swiglu() -> Result<()> {
    let (gate, up) = (var(&[3, 7], 0)?, var(&[3, 7], 1)?);
    check(&[gate.clone(), up.clone()], || {
        weighted(&gate.apply_op2(&up, SwiGlu)?)
    })
}

#[test]
fn rotary() -> Result<()> {
    let x = var(&[6, 8], 0)?;
    let turn = Rotary {
        heads: 2,
        seq: 3,
        angles: Rope::default().angles(4, 3).into(),
    };
    check(std::slice::from_ref(&x), || {
        weighted(&x.apply_op1(turn.clone())?)
    })?;
    // The first token of a sequence stays; lengths stay; products of two tokens depend on their distance alone.
    let rows = |x: &Tensor| x.to_vec2::<f32>();
    let (before, after) = (rows(&x)?, rows(&x.apply_op1(turn.clone())?)?);
    assert_eq!((&before[0], &before[3]), (&after[0], &after[3]));
    let row = x.narrow(0, 0, 1)?;
    let same = Tensor::cat(&[&row, &row, &row], 0)?;
    let turned = rows(&same.apply_op1(turn)?)?;
    let dot = |a: &[f32], b: &[f32]| -> f32 { a.iter().zip(b).map(|(a, b)| a * b).sum() };
    let near = (dot(&turned[0], &turned[1]), dot(&turned[1], &turned[2]));
    assert!((near.0 - near.1).abs() < 1e-5, "{near:?}");
    Ok(())
}

#[test]
fn dense() -> Result<()> {
    let (x, w) = (var(&[4, 5], 0)?, var(&[6, 5], 1)?);
    check(&[x.clone(), w.clone()], || {
        weighted(&x.apply_op2(&w, Dense { threads: 1 })?)
    })
}

/// The rows of tokens are linear in both tables: their product with a gradient is that of the tables with the gradient's sums.
#[test]
fn embedding() -> Result<()> {
    let flat = |shape: &[usize], number| var(shape, number)?.flatten_all()?.to_vec1::<f32>();
    let (tokens, positions) = (flat(&[5, 3], 0)?, flat(&[4, 3], 1)?);
    let ids = [0u32, 4, 4, 1, 2, 4];
    let gradient = flat(&[6, 3], 2)?;
    let dot = |a: &[f32], b: &[f32]| -> f32 { a.iter().zip(b).map(|(a, b)| a * b).sum() };
    let of = |seq| {
        Some(Positions {
            positions: &positions,
            seq,
        })
    };
    let x = embed(&ids, &tokens, 3, of(3))?;
    let (mut of_tokens, mut of_positions) = ([0.0; 15], [0.0; 12]);
    let rows = ids.iter().map(|&id| id as usize);
    add_rows(&gradient, 3, rows, &mut of_tokens);
    add_rows(&gradient, 3, (0..3).cycle(), &mut of_positions);
    let both = dot(&tokens, &of_tokens) + dot(&positions, &of_positions);
    assert!((dot(&x, &gradient) - both).abs() < 1e-5);
    assert_eq!(of_tokens[9..12], [0.0; 3]);
    assert_eq!(of_positions[9..], [0.0; 3]);
    assert!(embed(&[5], &tokens, 3, None).is_err());
    assert!(embed(&[0], &tokens, 3, of(5)).is_err());
    Ok(())
}

/// The values of `w` as a head.
fn head(w: &Var) -> Result<Arc<MemoryWeight>> {
    let (rows, cols) = w.dims2()?;
    let values = w.flatten_all()?.to_vec1()?;
    Ok(Arc::new(MemoryWeight::new(rows, cols, values)?))
}

/// What [`HeadLoss`] has from a head, as an operation over a variable.
#[derive(Debug)]
struct OverVar(HeadLoss, Arc<MemoryWeight>);

impl CustomOp2 for OverVar {
    fn name(&self) -> &'static str {
        "over_var"
    }

    fn cpu_fwd(
        &self,
        s1: &CpuStorage,
        l1: &Layout,
        _: &CpuStorage,
        _: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        self.0.cpu_fwd(s1, l1)
    }

    fn bwd(
        &self,
        x: &Tensor,
        w: &Tensor,
        res: &Tensor,
        grad: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>)> {
        let dx = self.0.bwd(x, res, grad)?;
        let dw = Tensor::from_vec(self.1.take_gradient()?, w.shape(), w.device())?;
        Ok((dx, Some(dw)))
    }
}

#[test]
fn head_loss() -> Result<()> {
    let (x, w) = (var(&[4, 5], 0)?, var(&[6, 5], 1)?);
    let targets: Arc<[u32]> = Arc::from([0u32, 5, Batch::IGNORED, 2]);
    check(&[x.clone(), w.clone()], || {
        x.apply_op2(&w, loss(&w, &targets, 0.0, 12)?)
    })
}

#[test]
fn gradients_of_a_loss_are_taken_once() -> Result<()> {
    let (x, w) = (var(&[4, 5], 0)?, var(&[6, 5], 1)?);
    let loss = x.apply_op2(&w, loss(&w, &Arc::from([0u32, 5, 1, 2]), 0.0, 12)?)?;
    loss.backward()?;
    let error = loss.backward().expect_err("taken").to_string();
    assert!(error.contains("gradients were taken"), "{error}");
    Ok(())
}

/// The loss of targets out of a vocabulary of 6, with at most `logits` logits at a time.
fn loss(w: &Var, targets: &Arc<[u32]>, z_loss: f32, logits: usize) -> Result<OverVar> {
    let options = LossOptions {
        divisor: 3,
        z_loss,
        gradients: true,
    };
    over(w, targets, options, logits)
}

fn over(w: &Var, targets: &Arc<[u32]>, options: LossOptions, logits: usize) -> Result<OverVar> {
    let head = head(w)?;
    let loss = HeadLoss::new(head.clone(), targets.clone(), options, 1, logits);
    Ok(OverVar(loss, head))
}

/// The z-loss is in the gradient, and not in the loss: its gradient alone against differences of the squared logarithms.
#[test]
fn z_loss() -> Result<()> {
    const COEFFICIENT: f32 = 0.3;
    let (x, w) = (var(&[4, 5], 0)?, var(&[6, 5], 1)?);
    let targets: Arc<[u32]> = Arc::from([0u32, 5, Batch::IGNORED, 2]);
    let [plain, with] = [0.0, COEFFICIENT].map(|z| {
        let loss = loss(&w, &targets, z, 12)?;
        x.apply_op2(&w, loss)
    });
    let (plain, with) = (plain?, with?);
    assert_eq!(plain.to_scalar::<f32>()?, with.to_scalar::<f32>()?);
    let (plain, with) = (plain.backward()?, with.backward()?);
    let expected = {
        let logits = x.matmul(&w.t()?)?;
        let log = logits.exp()?.sum(1)?.log()?;
        let counted = Tensor::new(&[1f32, 1.0, 0.0, 1.0], &Device::Cpu)?;
        let squares = (log.sqr()? * counted)?.sum_all()?;
        (squares * f64::from(COEFFICIENT / 3.0))?.backward()?
    };
    for var in [&x, &w] {
        let of = |store: &candle_core::backprop::GradStore| -> Result<Vec<f32>> {
            store.get(var).expect("a gradient").flatten_all()?.to_vec1()
        };
        for ((plain, with), expected) in of(&plain)?.into_iter().zip(of(&with)?).zip(of(&expected)?)
        {
            assert!(
                (with - plain - expected).abs() < 1e-5,
                "{with} {plain} {expected}"
            );
        }
    }
    Ok(())
}

/// However many tokens a part has: the same loss and gradients but for the order of sums.
#[test]
fn cut_loss_is_the_whole_one() -> Result<()> {
    let (tokens, dim, vocab) = (37, 24, 101);
    let (x, w) = (var(&[tokens, dim], 0)?, var(&[vocab, dim], 1)?);
    let targets = (0..tokens as u32).map(|t| match t % 5 {
        0 => Batch::IGNORED,
        _ => t * 7 % vocab as u32,
    });
    let targets: Arc<[u32]> = targets.collect();
    let run = |logits: usize| -> Result<(f32, [Vec<f32>; 2])> {
        let options = LossOptions {
            divisor: 29,
            z_loss: 1e-2,
            gradients: true,
        };
        let loss = x.apply_op2(&w, over(&w, &targets, options, logits)?)?;
        let store = loss.backward()?;
        let of = |var: &Var| store.get(var).expect("a gradient").flatten_all()?.to_vec1();
        Ok((loss.to_scalar()?, [of(&x)?, of(&w)?]))
    };
    let (loss, gradients) = run(usize::MAX)?;
    for logits in [1, vocab, 3 * vocab, 10 * vocab + 50, 36 * vocab] {
        let (cut_loss, cut) = run(logits)?;
        let off = (cut_loss / loss - 1.0).abs();
        assert!(off <= 2.0 * f32::EPSILON, "{logits}: {cut_loss} {loss}");
        for (whole, cut) in gradients.iter().zip(&cut) {
            let largest = whole.iter().fold(0f32, |most, value| most.max(value.abs()));
            for (whole, cut) in whole.iter().zip(cut) {
                assert!(
                    (whole - cut).abs() <= 4.0 * f32::EPSILON * largest,
                    "{whole} {cut}"
                );
            }
        }
    }
    Ok(())
}

#[test]
fn attention() -> Result<()> {
    let qkv = var(&[10, 12], 0)?;
    check(std::slice::from_ref(&qkv), || {
        weighted(&qkv.apply_op1(CausalAttention::new(2, 5, Seen::default()))?)
    })
}

#[test]
fn attention_over_more_than_one_query_block_is_causal() -> Result<()> {
    let (seq, dim) = (100, 4);
    let qkv = var(&[seq, 3 * dim], 0)?;
    let whole = qkv
        .apply_op1(CausalAttention::new(1, seq, Seen::default()))?
        .to_vec2::<f32>()?;
    for prefix in [1, 64, 65, 99] {
        let part = qkv.narrow(0, 0, prefix)?.contiguous()?;
        let part = part
            .apply_op1(CausalAttention::new(1, prefix, Seen::default()))?
            .to_vec2::<f32>()?;
        for (a, b) in part.iter().flatten().zip(whole.iter().flatten()) {
            assert!((a - b).abs() < 1e-5, "{a} {b}");
        }
    }
    Ok(())
}

/// Of tokens that see a window, and of documents that do not see those before them.
#[test]
fn attention_to_a_part() -> Result<()> {
    let qkv = var(&[10, 12], 0)?;
    let seen = Seen {
        window: Some(3),
        first: Some(Arc::from([0, 0, 0, 3, 3, 0, 1, 1, 1, 1])),
    };
    check(std::slice::from_ref(&qkv), || {
        weighted(&qkv.apply_op1(CausalAttention::new(2, 5, seen.clone()))?)
    })?;
    // As if each document were a sequence.
    let seen = Seen {
        window: None,
        first: Some(Arc::from([0, 0, 2, 2, 2, 2])),
    };
    let qkv = qkv.narrow(0, 0, 6)?;
    let packed = qkv.apply_op1(CausalAttention::new(2, 6, seen))?;
    for (start, len) in [(0, 2), (2, 4)] {
        let alone = qkv.narrow(0, start, len)?.contiguous()?;
        let alone = alone.apply_op1(CausalAttention::new(2, len, Seen::default()))?;
        let difference = (packed.narrow(0, start, len)? - alone)?.abs()?.max_all()?;
        assert!(difference.to_scalar::<f32>()? < 1e-6);
    }
    Ok(())
}

/// Targets that do not count add nothing to the loss.
#[test]
fn ignored_targets() -> Result<()> {
    let (x, w) = (var(&[4, 5], 0)?, var(&[6, 5], 1)?);
    let loss = |x: &Tensor, targets: Arc<[u32]>| {
        x.apply_op2(&w, loss(&w, &targets, 0.0, 12)?)?
            .to_scalar::<f32>()
    };
    let middle = x.narrow(0, 1, 2)?.contiguous()?;
    let targets = Arc::from([Batch::IGNORED, 5, 2, Batch::IGNORED]);
    assert_eq!(loss(&x, targets)?, loss(&middle, Arc::from([5, 2]))?);
    Ok(())
}

#[test]
fn quant_linear_equals_a_dense_layer() -> Result<()> {
    let (x, w) = (var(&[4, 5], 0)?, var(&[6, 5], 1)?);
    let weight = Arc::new(MemoryWeight::new(6, 5, w.flatten_all()?.to_vec1()?)?);
    let layer = QuantLinear::new(weight.clone(), 1);
    let ours = weighted(&layer.forward(&x)?)?;
    let theirs = weighted(&x.apply_op2(&w, Dense { threads: 1 })?)?;
    assert_eq!(ours.to_scalar::<f32>()?, theirs.to_scalar::<f32>()?);
    let (ours, theirs) = (ours.backward()?, theirs.backward()?);
    let flat = |t: Option<&Tensor>| t.map(|t| t.flatten_all()?.to_vec1::<f32>()).transpose();
    assert_eq!(flat(ours.get(&x))?, flat(theirs.get(&x))?);
    assert_eq!(Some(weight.take_gradient()?), flat(theirs.get(&w))?);
    assert!(weight.take_gradient()?.iter().all(|&g| g == 0.0));
    Ok(())
}

#[test]
fn parts_of_a_batch_sum_to_the_whole() -> Result<()> {
    let config = GptConfig {
        dim: 16,
        layers: 2,
        heads: 2,
        seq: 8,
        vocab: 256,
        arch: Arch::Gpt,
    };
    let mut layers: Vec<Box<dyn Linear>> = Vec::new();
    for (spec, number) in config.linears().iter().zip(0..) {
        let values = spec.init.rows(1, number, 0..spec.rows, spec.cols);
        let weight = Arc::new(MemoryWeight::new(spec.rows, spec.cols, values)?);
        layers.push(Box::new(QuantLinear::new(weight, 1)));
    }
    let (mut vars, mut tables) = (Vec::new(), Vec::new());
    for (spec, number) in config.vars().iter().zip(100..) {
        let count = spec.shape.iter().product();
        let values = spec.init.rows(1, number, 0..1, count);
        match (spec.used.is_transient(), spec.shape.as_slice()) {
            (true, &[rows, cols]) => {
                let table = MemoryWeight::new(rows, cols, values)?;
                tables.push(Arc::new(table) as Arc<dyn WeightSource>);
            }
            (_, shape) => vars.push(Var::from_vec(values, shape, &Device::Cpu)?),
        }
    }
    let model = Gpt::new(config, layers, vars, tables, 1, false)?;
    let text: Vec<u32> = (0..=3 * 8u32).map(|i| i * 37 % 256).collect();
    let loss = |from: usize, to: usize| -> Result<f64> {
        let batch = Batch::new(text[from..to].to_vec(), text[from + 1..=to].to_vec());
        Ok(f64::from(model.loss(&batch, 24)?.value()?))
    };
    assert!((loss(0, 24)? - loss(0, 16)? - loss(16, 24)?).abs() < 1e-6);
    Ok(())
}
