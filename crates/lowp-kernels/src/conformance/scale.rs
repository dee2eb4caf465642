//! Scale jobs.

use lowp_format::{AmaxAlgorithm, ScaleSource, tensor_scale};

use super::*;
use crate::ScaleJob;

pub(super) fn every_source_gives_what_encoding_needs<B: Backend>(rig: &Rig<B>) {
    let observed = rig.buffer::<f32>(&[3.0, 3.0, 4.0, 9.0]);
    let scales = rig.buffer::<f32>(&[1.0; 4]);
    let history = rig.buffer::<f32>(&[2.0, 5.0, 1.0]);
    let element = Code::E4M3;
    let delayed = ScaleSource::History {
        window: 3,
        algorithm: AmaxAlgorithm::Max,
        margin: 0,
    };
    let rules = [
        (delayed, Some(history.clone())),
        (
            ScaleSource::TensorAmax {
                pow2: true,
                epsilon: 0.0,
            },
            None,
        ),
        (ScaleSource::TensorAndBlockAmax, None),
        (ScaleSource::BlockAmax, None),
    ];
    let job = |(index, (rule, history)): (usize, (ScaleSource, Option<_>))| ScaleJob {
        observed: observed.clone(),
        scales: scales.clone(),
        index,
        history,
        rule,
        element,
    };
    let jobs: Vec<_> = rules.into_iter().enumerate().map(job).collect();
    rig.run(Work::Scale(jobs.clone()));
    let current = tensor_scale(3.0, element, true, 0.0);
    assert_eq!(
        rig.content::<f32>(&scales),
        [448.0 / 5.0, current, 4.0, 1.0]
    );
    assert_eq!(rig.content::<f32>(&observed), [0.0; 4]);
    assert_eq!(rig.content::<f32>(&history), [0.0, 1.0, 3.0]);

    let twice = vec![jobs[1].clone(), jobs[1].clone()];
    assert!(matches!(
        rig.plan(Work::Scale(twice)),
        Err(KernelError::Aliased { other: 0, .. })
    ));
    let lost = ScaleJob {
        history: None,
        ..jobs[0].clone()
    };
    assert!(matches!(
        rig.plan(Work::Scale(vec![lost])),
        Err(KernelError::Missing { .. })
    ));
    let short = ScaleJob {
        history: Some(rig.buffer::<f32>(&[0.0])),
        ..jobs[0].clone()
    };
    assert!(matches!(
        rig.plan(Work::Scale(vec![short])),
        Err(KernelError::Length { .. })
    ));
}
