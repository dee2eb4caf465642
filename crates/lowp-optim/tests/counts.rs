//! What an optimizer says about itself: its parameters, the steps it applied and those it skipped.

use lowp_format::{AnyRecipe, QuantizedTensor, Shape, Usage};
use lowp_kernels::{Backend, Cpu};
use lowp_optim::{AdamWBuilder, Group, ParamSpec, StepOptions};
use lowp_shard::{LocalComm, ScaleBookBuilder};

const SHAPE: Shape = Shape::new(2, 32);

#[test]
fn parameters_applied_and_skipped_steps_are_counted() {
    let cpu = Cpu;
    let comm = LocalComm::solo(&cpu);
    for parameters in 0..4 {
        let mut book = ScaleBookBuilder::default();
        let mut builder = AdamWBuilder::new(&cpu);
        let group = builder.group(Group::default());
        let mut ids = Vec::new();
        for index in 0..parameters {
            let tensor = QuantizedTensor::new(AnyRecipe::all()[0], SHAPE, Usage::BOTH, |_, n| {
                cpu.alloc::<u8>(n)
            })
            .unwrap();
            let spec = ParamSpec::new(format!("p{index}"), group, vec![0.5; SHAPE.elements()]);
            ids.push(builder.param(&mut book, &tensor, spec).unwrap());
        }
        let book = book.build(&cpu).unwrap();
        let mut adamw = builder.finish(&book).unwrap();
        adamw.calibrate(&book, &comm).unwrap();
        assert_eq!(
            (adamw.len(), adamw.is_empty()),
            (parameters, parameters == 0)
        );

        let (mut applied, mut skipped) = (0, 0);
        for grad in [0.1, f32::NAN, 0.2, f32::INFINITY, f32::NAN] {
            for &id in &ids {
                adamw.set_grad(id, &[grad; SHAPE.elements()]).unwrap();
            }
            let report = adamw.step(&StepOptions::default(), &book, &comm, &comm);
            // Without parameters no gradient can be bad.
            let fits = grad.is_finite() || parameters == 0;
            assert_eq!(report.unwrap().applied, fits);
            applied += u64::from(fits);
            skipped += u64::from(!fits);
            assert_eq!((adamw.steps(), adamw.skipped()), (applied, skipped));
        }
    }
}
