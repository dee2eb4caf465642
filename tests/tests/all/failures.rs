//! What a user of the optimizer can get wrong on one rank: every mistake is an error that names it.

use std::sync::Arc;

use half::bf16;
use lowp_comm::{Communicator, LocalComm};
use lowp_format::{
    AnyRecipe, Buffer, Fp8Format, QuantizedTensor, Quantizers, Recipe, RecipeOptions, Role,
    ScaleRule, Shape, Usage,
};
use lowp_kernels::{Backend, Cpu, CpuBuffer, KernelError, Source};
use lowp_optim::{
    FloatDtype, Group, OptimError, OptimizerBuilder, ParamId, ParamSpec, PendingStep, StepOptions,
};
use lowp_shard::{CastItem, CastPlan, ScaleBookBuilder, ShardError};
use lowp_tests::model::{Case, Rank, kernels, waits_for_amax};

const SHAPE: Shape = Shape::new(32, 32);

type Tensor = QuantizedTensor<CpuBuffer<u8>>;

fn tensor(recipe: AnyRecipe) -> Tensor {
    QuantizedTensor::new(recipe, SHAPE, Usage::BOTH, |_, bytes| {
        Cpu.alloc::<u8>(bytes)
    })
    .expect("a tensor")
}

fn spec(name: &str) -> ParamSpec {
    ParamSpec::new(name, 0, vec![1.0; SHAPE.elements()])
}

/// A builder with one group.
fn builder() -> OptimizerBuilder<Cpu> {
    let mut builder = OptimizerBuilder::new(LocalComm::solo(&Cpu));
    builder.group(Group::default());
    builder
}

/// A recipe without scales.
fn plain() -> AnyRecipe {
    let plain = |r: &AnyRecipe| kernels(r).map(|key| key.scale) == [ScaleRule::None; 2];
    AnyRecipe::all().into_iter().find(plain).expect("a recipe")
}

fn assert_says(error: &impl ToString, words: &[&str]) {
    let text = error.to_string();
    for word in words {
        assert!(text.contains(word), "'{word}' is missing in: {text}");
    }
}

#[test]
fn registration_mistakes_are_named() {
    for recipe in AnyRecipe::all() {
        let mut builder = builder();
        let mut register = |spec: ParamSpec| builder.param(&tensor(recipe), spec);
        register(spec("first")).expect("a parameter");
        let error = register(spec("first")).expect_err("the name is taken");
        assert_says(&error, &["'first'", "exactly once"]);
        let error = register(ParamSpec {
            group: 4,
            ..spec("second")
        });
        assert_says(
            &error.expect_err("no such group"),
            &["'second'", "group 4", "1 groups"],
        );
        let short = ParamSpec::new("third", 0, vec![0.0; 7]);
        let error = register(short).expect_err("too few values");
        assert_says(&error, &["'third'", "master", "7", "1024"]);
    }
}

#[test]
fn hyperparameters_out_of_range_are_rejected() {
    let mut builder = builder();
    builder.group(Group {
        betas: (0.9, 1.0),
        ..Group::default()
    });
    let error = builder.build().expect_err("beta2 of 1");
    assert_says(&error, &["beta2 of group 1", "is 1", "below 1"]);
}

#[test]
fn gradient_mistakes_are_named() {
    let mut builder = builder();
    let wide = builder.param(&tensor(plain()), spec("wide"));
    let wide = wide.expect("a parameter");
    let narrow = ParamSpec {
        grad: FloatDtype::Bf16,
        ..spec("narrow")
    };
    let narrow = builder.param(&tensor(plain()), narrow);
    let narrow = narrow.expect("a parameter");
    let mut optimizer = builder.build().expect("an optimizer");
    let f32s = [1.0f32; 1024];

    let error = optimizer
        .set_grad(narrow, &f32s)
        .expect_err("bf16 gradients");
    assert_says(&error, &["'narrow'", "bf16"]);
    let error = optimizer.set_grad(wide, &f32s[1..]).expect_err("too short");
    assert_says(&error, &["'wide'", "the gradient", "1023", "1024"]);
    let options = StepOptions::default();
    let error = optimizer.step(&options).expect_err("no gradients");
    assert_says(&error, &["2 of 2"]);

    optimizer.set_grad(wide, &f32s).expect("a gradient");
    let error = optimizer.step(&options);
    let error = error.expect_err("one of two gradients");
    assert_says(&error, &["'narrow'", "1 of 2"]);
    // A rank of its own mends it and goes on.
    let Source::Bf16(grad) = optimizer.grad(narrow) else {
        panic!("a bf16 gradient");
    };
    Cpu.write(grad, 0, &[bf16::ONE; 1024]).expect("a gradient");
    optimizer.mark_ready(narrow);
    let report = optimizer.step(&options).and_then(PendingStep::wait);
    assert!(report.expect("a step").applied);
    // Gradients are used once.
    let error = optimizer.step(&options);
    assert_says(&error.expect_err("no gradients"), &["2 of 2"]);
    optimizer.set_grad(wide, &f32s).expect("a gradient");
    optimizer.clear_grads();
    let error = optimizer.step(&options);
    assert_says(&error.expect_err("no gradients"), &["2 of 2"]);
}

#[test]
fn ids_of_another_optimizer_are_rejected() {
    let optimizer = || {
        let mut builder = builder();
        let id = builder.param(&tensor(plain()), spec("weight"));
        let optimizer = builder.build().expect("an optimizer");
        (optimizer, id.expect("a parameter"))
    };
    let ((mut optimizer, own), (_, foreign)) = (optimizer(), optimizer());
    let rejected = |error: OptimError| assert_says(&error, &["another optimizer"]);
    let values = [0.0; SHAPE.elements()];
    rejected(optimizer.set_grad(foreign, &values).expect_err("foreign"));
    rejected(optimizer.master(foreign).expect_err("foreign"));
    rejected(optimizer.states(foreign).expect_err("foreign"));
    optimizer.set_grad(own, &values).expect("its own");
}

#[test]
fn step_options_out_of_range_are_rejected() {
    let plain = Case::new(plain(), SHAPE, vec![1.0; 1024]);
    let comm: Arc<dyn Communicator<Cpu>> = Arc::new(LocalComm::solo(&Cpu));
    let mut rank = Rank::new(&[plain], &[Group::default()], &comm, &comm).expect("a model");
    let good = StepOptions::default();
    let with = |max_norm| StepOptions { max_norm, ..good };
    let rate = |lr_factor| StepOptions { lr_factor, ..good };
    for (options, word) in [
        (rate(f32::NAN), "lr_factor"),
        (rate(-1.0), "lr_factor"),
        (with(Some(f32::NAN)), "max_norm"),
        (with(Some(0.0)), "max_norm"),
        (with(Some(-1.0)), "max_norm"),
    ] {
        let before = rank.state().expect("a state");
        let error = rank
            .step(&[vec![1.0; 1024]], &options)
            .expect_err("out of range");
        assert_says(&error, &[word]);
        assert!(rank.state().expect("a state") == before);
    }
    assert!(
        rank.step(&[vec![1.0; 1024]], &with(Some(f32::INFINITY)))
            .is_ok()
    );
}

/// Tensors of `a` and `b` that share a buffer, if they have buffers of one length.
fn sharing(a: AnyRecipe, b: AnyRecipe) -> Option<[Tensor; 2]> {
    let first = tensor(a);
    let mut shared = None;
    let second = QuantizedTensor::new(b, SHAPE, Usage::BOTH, |_, bytes| {
        let fits = |b: &&Buffer<CpuBuffer<u8>>| b.storage.len() == bytes;
        if shared.is_none() {
            shared = first.buffers().iter().find(fits).map(|b| b.storage.clone());
            if let Some(buffer) = &shared {
                return Ok(buffer.clone());
            }
        }
        Cpu.alloc::<u8>(bytes)
    });
    shared.as_ref()?;
    Some([first.clone(), second.expect("a tensor")])
}

/// Whatever the two recipes are: also if one is cast in the first pass and one in the second.
#[test]
fn a_buffer_of_two_parameters_is_rejected() {
    let (mut pairs, mut mixed) = (0, 0);
    for a in AnyRecipe::all() {
        for b in AnyRecipe::all() {
            let Some([first, second]) = sharing(a, b) else {
                continue;
            };
            let mut builder = builder();
            for (name, tensor) in [
                ("a", &first),
                ("other", &tensor(a)),
                ("b", &second),
                ("last", &tensor(b)),
            ] {
                let registered = builder.param(tensor, spec(name));
                registered.expect("not known before the build");
            }
            let error = builder.build().expect_err("a shared buffer");
            assert_says(&error, &["'a'", "'b'", "same buffer"]);

            // The cast by itself rejects it too.
            let mut book = ScaleBookBuilder::default();
            let source = || Source::F32(Cpu.alloc(SHAPE.elements()).expect("room"));
            let items = [&first, &second].map(|t| CastItem::rows(t, source(), &mut book));
            let book = book.build(&Cpu).expect("a book");
            let error = CastPlan::new(&Cpu, &book, &items).expect_err("a shared buffer");
            let aliased = matches!(error, ShardError::Kernel(KernelError::Aliased { .. }));
            assert!(aliased, "{error}");
            pairs += 1;
            mixed += usize::from(waits_for_amax(&a) != waits_for_amax(&b));
        }
    }
    assert!(pairs > 20 && mixed > 5, "{pairs} pairs, {mixed} mixed");
}

/// Weights after a Hadamard transform, which only operands of the weight gradient pass.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Transformed(AnyRecipe);

impl Recipe for Transformed {
    fn name(&self) -> &'static str {
        "transformed"
    }

    fn quantizers(&self, _: Role) -> Quantizers {
        self.0.quantizers(Role::Activation)
    }
}

#[test]
fn a_transformed_weight_is_rejected() {
    let transforms = |r: &Transformed| kernels(r).iter().any(|key| key.hadamard);
    let all = AnyRecipe::all().into_iter().map(Transformed);
    let recipes: Vec<Transformed> = all.filter(transforms).collect();
    assert!(!recipes.is_empty());
    for recipe in recipes {
        let tensor = QuantizedTensor::new(recipe, SHAPE, Usage::BOTH, |_, n| Cpu.alloc::<u8>(n));
        let mut builder = builder();
        let id = builder.param(&tensor.expect("a tensor"), spec("weight"));
        id.expect("not known before the build");
        let error = builder.build().expect_err("no weight passes a transform");
        assert_says(&error, &["the cast of a weight", "transform", "operand"]);
    }
}

/// A delayed scale for each orientation: E4M3 for the forward product, E5M2 for the backward ones.
#[derive(Clone, Copy, Debug, PartialEq)]
struct TwoDelayed([AnyRecipe; 2]);

impl Recipe for TwoDelayed {
    fn name(&self) -> &'static str {
        "two-delayed"
    }

    fn quantizers(&self, role: Role) -> Quantizers {
        let [row, col] = self.0.map(|recipe| recipe.quantizers(role));
        Quantizers::independent(row.rowwise, col.columnwise)
    }
}

/// One entry per weight is observed: a second one would keep its first scale forever.
#[test]
fn two_delayed_scales_of_one_weight_are_rejected() {
    let recipe = |name: &str, format| {
        let options = RecipeOptions::default().with("format", format);
        AnyRecipe::from_name(name, &options).expect("a recipe")
    };
    for (name, rejected) in [("fp8-delayed", true), ("fp8-current", false)] {
        let formats = [Fp8Format::E4M3, Fp8Format::E5M2];
        let recipe = TwoDelayed(formats.map(|format| recipe(name, format)));
        let tensor = QuantizedTensor::new(recipe, SHAPE, Usage::BOTH, |_, n| Cpu.alloc::<u8>(n));
        let mut builder = builder();
        let id = builder.param(&tensor.expect("a tensor"), spec("weight"));
        id.expect("not known before the build");
        match builder.build() {
            Ok(_) => assert!(!rejected, "{name}"),
            Err(error) => {
                assert!(rejected, "{name}: {error}");
                assert_says(
                    &error,
                    &["two orientations", "delayed", "the same element and rule"],
                );
            }
        }
    }
}

/// A foreign id where no error can be returned.
#[test]
#[should_panic(expected = "another optimizer")]
fn the_gradient_of_a_foreign_id_panics_with_the_reason() {
    let comm: Arc<dyn Communicator<Cpu>> = Arc::new(LocalComm::solo(&Cpu));
    let case = Case::new(plain(), SHAPE, vec![1.0; 1024]);
    let rank = || {
        Rank::new(
            std::slice::from_ref(&case),
            &[Group::default()],
            &comm,
            &comm,
        )
    };
    let (own, other) = (rank().expect("a model"), rank().expect("a model"));
    let foreign: ParamId = other.ids[0];
    let _ = own.optimizer.grad(foreign);
}
