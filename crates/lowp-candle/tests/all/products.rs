//! The three products of a layer against the scalar definitions: each operand is encoded and
//! decoded element by element with the codecs of `lowp-format`, and the products must have the
//! same bits.

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use candle_core::{Device, Var};
use half::bf16;
use lowp_candle::{CandleError, MatRef, layers, product};
use lowp_comm::{Communicator, Mesh, MeshComm, run_ranks};
use lowp_format::{
    AnyRecipe, Buffer, Code, Columnwise, KernelKey, Operand, Orientation, Part, Philox, Quantizers,
    Recipe, RecipeOptions, ReshardAfterForward, Role, Rounding, ScaleRule, Shape, SourceRounding,
    Usage, tensor_scale,
};
use lowp_fsdp::{Gradients, LinearSpec, ModelOptions, ShardedModel, Sharding, VarPlace};
use lowp_kernels::reference::{RandomBytes, Reference, decode};
use lowp_kernels::{Backend, Cpu};
use lowp_optim::Group;
use lowp_shard::{GradBucketOptions, GradParam, Init};

const TIMEOUT: Duration = Duration::from_secs(60);

/// Tokens of two ranks of whole blocks each; blocks of 128 have edges along the other axes, shorter ones none.
const TOKENS: usize = 256;
const ROWS: usize = 96;
const COLS: usize = 64;

const SEED: u64 = 7;
/// The layer under test is the second, so that streams of the first are not mistaken for its own.
const LAYER: usize = 1;
const STEP: u64 = 5;
/// Index of the batch's first token.
const FIRST: usize = 640;

/// A recipe whose operands are quantized in some products only.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Control {
    recipe: AnyRecipe,
    activations: Usage,
    gradients: Usage,
}

impl Control {
    fn none(recipe: AnyRecipe) -> Self {
        Self {
            recipe,
            activations: Usage::BOTH,
            gradients: Usage::BOTH,
        }
    }
}

impl Recipe for Control {
    fn name(&self) -> &'static str {
        self.recipe.name()
    }

    fn quantizers(&self, role: Role) -> Quantizers {
        self.recipe.quantizers(role)
    }

    fn source_rounding(&self) -> SourceRounding {
        self.recipe.source_rounding()
    }

    fn operand(&self, role: Role) -> Operand {
        Operand {
            quantized: match role {
                Role::Weight => Usage::BOTH,
                Role::Activation => self.activations,
                Role::Gradient => self.gradients,
            },
            ..self.recipe.operand(role)
        }
    }
}

/// docs/numerics.md 15 on a `[rows, cols]` matrix, whole groups only.
fn rotate(values: &[f32], cols: usize) -> Vec<f32> {
    const MASK: u32 = 0xD7E8;
    let mut out = vec![0.0; values.len()];
    for group in 0..values.len() / cols / 16 {
        for k in 0..cols {
            let at = |i: usize| (16 * group + i) * cols + k;
            let mut v: [f32; 16] = std::array::from_fn(|i| {
                let sign = if MASK >> i & 1 == 1 { -1.0 } else { 1.0 };
                values[at(i)] * (sign * 0.25)
            });
            for h in [1, 2, 4, 8] {
                for i in (0..16).filter(|i| i & h == 0) {
                    (v[i], v[i + h]) = (v[i] + v[i + h], v[i] - v[i + h]);
                }
            }
            (0..16).for_each(|i| out[at(i)] = v[i]);
        }
    }
    out
}

/// What a product reads of `values`, by the scalar definitions; a delayed scale is 1, or `calibrated` by the values.
fn read_by_product(
    operand: &Operand,
    orientation: Orientation,
    cols: usize,
    values: &[f32],
    random: Option<RandomBytes>,
    calibrated: bool,
) -> Vec<f32> {
    let mut values = values.to_vec();
    let quantizers = &operand.quantizers;
    let exact = !operand.quantized.contains(orientation.usage());
    if !exact {
        let round = |v: &mut f32| *v = operand.source_rounding.apply(*v);
        values.iter_mut().for_each(round);
    }
    if quantizers.of(orientation).kernel.hadamard {
        values = rotate(&values, cols);
        if !exact {
            let round = |v: &mut f32| *v = bf16::from_f32(*v).to_f32();
            values.iter_mut().for_each(round);
        }
    }
    if exact {
        return values;
    }
    // What follows from the rowwise codes decodes to their values.
    let orientation = match quantizers.relation {
        Columnwise::Quantized => orientation,
        Columnwise::Transposed | Columnwise::Shared => Orientation::Rowwise,
    };
    let kernel = KernelKey {
        hadamard: false,
        ..quantizers.of(orientation).kernel
    };
    let shape = Shape::new(values.len() / cols, cols);
    let mut reference = Reference {
        shape,
        orientation,
        kernel,
        values: &values,
        source_rounding: SourceRounding::F32,
        tensor: &[],
        random: random.filter(|_| kernel.element == Code::E2M1),
    };
    let tensor = match kernel.scale {
        ScaleRule::Delayed { .. } if calibrated => {
            let amax = reference.tensor_amax();
            vec![tensor_scale(amax, kernel.element, false, 0.0)]
        }
        // Histories are empty in the first pass.
        ScaleRule::Delayed { .. } => vec![1.0],
        _ => reference.encode_scales(&reference.outer_amaxes()),
    };
    reference.tensor = &tensor;
    let bytes = |part| {
        let buffers = quantizers.buffers(orientation.usage());
        let spec = buffers
            .into_iter()
            .find(|s| s.key.serves(orientation, part))?;
        let bytes = reference.encode(&spec).expect("a defined encoding");
        Some(Buffer {
            spec,
            storage: bytes,
        })
    };
    let data = bytes(Part::Data).expect("a data buffer");
    let scales = bytes(Part::BlockScale);
    let decode_by: Vec<f32> = match kernel.scale {
        ScaleRule::TwoLevel { .. } => tensor.clone(),
        _ => tensor.iter().map(|scale| 1.0 / scale).collect(),
    };
    decode(
        shape,
        orientation,
        &kernel,
        &data,
        scales.as_ref(),
        &decode_by,
    )
}

/// `y`, `dx` and `dW` of the whole batch.
#[derive(Debug, PartialEq)]
struct Products {
    y: Vec<f32>,
    dx: Vec<f32>,
    dw: Vec<f32>,
}

fn x() -> Vec<f32> {
    // An outlier that only the transform spreads.
    let mut x = Init::Normal(1.0).rows(3, 9, 0..TOKENS, COLS);
    x[70 * COLS + 5] = 40.0;
    x
}

fn dy() -> Vec<f32> {
    Init::Normal(0.3).rows(4, 9, 0..TOKENS, ROWS)
}

/// The definition, with the batch dealt to `world` ranks.
fn expected(recipe: &impl Recipe, world: usize) -> Products {
    let w = Init::Normal(0.1).rows(SEED, LAYER as u64, 0..ROWS, COLS);
    let (rowwise, columnwise) = (Orientation::Rowwise, Orientation::Columnwise);
    let activation = recipe.operand(Role::Activation);
    let gradient = recipe.operand(Role::Gradient);
    let weight = recipe.operand(Role::Weight);
    let random = |operand: &Operand, role: u64, cols: usize| {
        let stream = (1 << 62) | (LAYER as u64 * 4 + role);
        let philox = Philox::new(SEED, stream + (STEP << 32));
        let first = (FIRST * cols) as u64;
        let bytes = RandomBytes { philox, first };
        (operand.rounding == Rounding::Stochastic).then_some(bytes)
    };
    let wf = read_by_product(&weight, rowwise, COLS, &w, None, true);
    let wb = read_by_product(&weight, columnwise, COLS, &w, None, true);
    let (x, dy) = (x(), dy());
    let xf = read_by_product(&activation, rowwise, COLS, &x, None, false);
    let xw = read_by_product(&activation, columnwise, COLS, &x, None, false);
    let [to_input, to_weight] = [2, 3].map(|role| random(&gradient, role, ROWS));
    let gb = read_by_product(&gradient, rowwise, ROWS, &dy, to_input, false);
    let gw = read_by_product(&gradient, columnwise, ROWS, &dy, to_weight, false);
    let mut found = Products {
        y: Vec::new(),
        dx: Vec::new(),
        dw: vec![0.0; ROWS * COLS],
    };
    let tokens = TOKENS / world;
    for rank in 0..world {
        let part = |values: &[f32], cols: usize| {
            values[rank * tokens * cols..(rank + 1) * tokens * cols].to_vec()
        };
        let (xf, xw) = (part(&xf, COLS), part(&xw, COLS));
        let (gb, gw) = (part(&gb, ROWS), part(&gw, ROWS));
        let wf = MatRef::new(&wf, ROWS, COLS);
        let y = product(MatRef::new(&xf, tokens, COLS), wf.t(), 1);
        found.y.extend(y);
        let wb = MatRef::new(&wb, ROWS, COLS);
        let dx = product(MatRef::new(&gb, tokens, ROWS), wb, 1);
        found.dx.extend(dx);
        let gw = MatRef::new(&gw, tokens, ROWS);
        let dw = product(gw.t(), MatRef::new(&xw, tokens, COLS), 1);
        found.dw.iter_mut().zip(dw).for_each(|(sum, v)| *sum += v);
    }
    found
}

/// What the layer of a sharded model computes.
fn computed<R: Recipe>(recipe: R, world: usize) -> Products {
    let specs = [(128, 32), (ROWS, COLS)].map(|(rows, cols)| LinearSpec {
        name: format!("{rows}x{cols}"),
        block: 0,
        rows,
        cols,
        init: Init::Normal(0.1),
        amax_group: None,
    });
    let ranks = run_ranks(&Cpu, world, TIMEOUT, |rank, comm| {
        let cpu = Cpu;
        let options = ModelOptions {
            sharding: Sharding::Fsdp,
            reshard_after_forward: ReshardAfterForward::Yes,
            grads: GradBucketOptions::default(),
            seed: SEED,
            group: Group::default(),
            vars: VarPlace::Host,
            ..ModelOptions::default()
        };
        let comm: Arc<dyn Communicator<Cpu>> = comm;
        let mesh = MeshComm::new(Mesh::sharded(world), comm)?;
        let model = ShardedModel::new(&cpu, &mesh, |_| recipe, &specs, &[], options)?;
        let weight = model.weight(LAYER).expect("the layer");
        let rows = cpu.alloc::<f32>(weight.element_ranges()[rank].len())?;
        let param = GradParam {
            block: None,
            name: "dw".to_owned(),
            ranges: weight.element_ranges().to_vec(),
            out: rows.clone(),
        };
        let gradients = Gradients::new(&cpu, &mesh, vec![param], options.grads)?;
        weight.connect(&Arc::new(gradients), 0)?;
        let tokens = TOKENS / world;
        model.begin(STEP, (FIRST + rank * tokens) as u64, true)?;
        let part = |values: Vec<f32>, cols: usize| {
            let mine = rank * tokens * cols..(rank + 1) * tokens * cols;
            Var::from_slice(&values[mine], (tokens, cols), &Device::Cpu)
        };
        let x = part(x(), COLS)?;
        let y = layers(&model, 1)[LAYER].forward(&x)?;
        // The gradient of this sum with respect to y is dy.
        let sum = (&y * part(dy(), ROWS)?.as_tensor())?.sum_all()?;
        let store = sum.backward()?;
        let dx = store.get(&x).expect("a gradient");
        let owned = weight.element_ranges()[rank].clone();
        let runs: Vec<Range<usize>> = weight.tiles().runs(owned).collect();
        let products = Products {
            y: y.flatten_all()?.to_vec1()?,
            dx: dx.flatten_all()?.to_vec1()?,
            dw: cpu.download(&rows)?,
        };
        Ok::<_, CandleError>((products, runs))
    })
    .unwrap_or_else(|e| panic!("{}: {e}", recipe.name()));
    let mut all = Products {
        y: Vec::new(),
        dx: Vec::new(),
        dw: vec![f32::NAN; ROWS * COLS],
    };
    for (rank, runs) in ranks {
        all.y.extend(rank.y);
        all.dx.extend(rank.dx);
        let mut values = rank.dw.into_iter();
        for index in runs.into_iter().flatten() {
            all.dw[index] = values.next().expect("a value of each element");
        }
        assert_eq!(values.next(), None);
    }
    all
}

fn check(recipe: impl Recipe, what: &str) {
    for world in [1, 2] {
        let (computed, expected) = (computed(recipe, world), expected(&recipe, world));
        let bits = |values: &[f32]| values.iter().map(|v| v.to_bits()).collect::<Vec<_>>();
        let pairs = [
            ("y = x W", &computed.y, &expected.y),
            ("the input gradient", &computed.dx, &expected.dx),
            ("the weight gradient", &computed.dw, &expected.dw),
        ];
        for (product, computed, expected) in pairs {
            let differ = bits(computed) != bits(expected);
            assert!(!differ, "{what}, {world} ranks: {product} differs");
        }
    }
}

#[test]
fn every_product_is_that_of_the_definition() {
    for recipe in AnyRecipe::all() {
        check(Control::none(recipe), recipe.name());
    }
}

/// Every value of every option, one at a time.
#[test]
fn options_change_operands_as_the_definition_says() {
    for recipe in AnyRecipe::low_precision() {
        let name = recipe.name();
        for spec in AnyRecipe::options_of(name).expect("a recipe") {
            for value in (spec.names)() {
                let mut options = RecipeOptions::default();
                options.set(spec.name, value);
                let changed = AnyRecipe::from_name(name, &options).ok();
                if let Some(changed) = changed.filter(|changed| *changed != recipe) {
                    let what = format!("{name}, {}={value}", spec.name);
                    check(Control::none(changed), &what);
                }
            }
        }
    }
}

#[test]
fn a_product_reads_exactly_what_it_is_asked_to() {
    let sets = [Usage::empty(), Usage::ROWWISE, Usage::COLUMNWISE];
    for recipe in AnyRecipe::low_precision() {
        for quantized in sets {
            let activations = Control {
                activations: quantized,
                ..Control::none(recipe)
            };
            let gradients = Control {
                gradients: quantized,
                ..Control::none(recipe)
            };
            let what = |operand| format!("{}, {operand} {quantized}", recipe.name());
            check(activations, &what("activations"));
            check(gradients, &what("gradients"));
        }
    }
}
