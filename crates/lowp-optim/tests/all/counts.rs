//! What an optimizer says about itself: its parameters, the steps it applied and those it skipped.

use lowp_comm::LocalComm;
use lowp_format::{AnyRecipe, QuantizedTensor, Shape, Usage};
use lowp_kernels::{Backend, Cpu, StepCounts};
use lowp_optim::{Group, OptimizerBuilder, ParamSpec, StepOptions};

const SHAPE: Shape = Shape::new(2, 32);

#[test]
fn parameters_applied_and_skipped_steps_are_counted() {
    let cpu = Cpu;
    for parameters in 0..4 {
        let mut builder = OptimizerBuilder::new(LocalComm::solo(&cpu));
        let group = builder.group(Group::default());
        let mut ids = Vec::new();
        for index in 0..parameters {
            let tensor = QuantizedTensor::new(AnyRecipe::all()[0], SHAPE, Usage::BOTH, |_, n| {
                cpu.alloc::<u8>(n)
            })
            .unwrap();
            let spec = ParamSpec::new(format!("p{index}"), group, vec![0.5; SHAPE.elements()]);
            ids.push(builder.param(&tensor, spec).unwrap());
        }
        let mut optimizer = builder.build().unwrap();
        assert_eq!(
            (optimizer.len(), optimizer.is_empty()),
            (parameters, parameters == 0)
        );

        let (mut applied, mut skipped) = (0, 0);
        for grad in [0.1, f32::NAN, 0.2, f32::INFINITY, f32::NAN] {
            for &id in &ids {
                optimizer.set_grad(id, &[grad; SHAPE.elements()]).unwrap();
            }
            let report = optimizer
                .step(&StepOptions::default())
                .unwrap()
                .wait()
                .unwrap();
            // Without parameters no gradient can be bad.
            let fits = grad.is_finite() || parameters == 0;
            assert_eq!(report.applied, fits);
            applied += u64::from(fits);
            skipped += u64::from(!fits);
            assert_eq!((report.steps, report.skipped), (applied, skipped));
            assert_eq!(optimizer.counts().unwrap(), StepCounts { applied, skipped });
        }
    }
}
