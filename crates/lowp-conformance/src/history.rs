//! Amax histories of delayed scaling.

use lowp_format::AmaxAlgorithm;

use super::*;
use lowp_kernels::HistoryJob;

pub fn a_history_takes_the_amax_and_gives_the_scale<B: Backend>(rig: &Rig<B>) {
    let observed = rig.buffer::<f32>(&[3.0, 6.0, 0.0]);
    let scales = rig.buffer::<f32>(&[1.0, 1.0, 7.0]);
    let columns = [
        vec![2.0, 5.0, 1.0],
        vec![2.0, 5.0, 1.0, 100.0],
        vec![0.0, 8.0],
    ];
    let histories = columns.map(|column| rig.buffer::<f32>(&column));
    let job = |index: usize, algorithm, margin| HistoryJob {
        observed: observed.clone(),
        scales: scales.clone(),
        index,
        history: histories[index].clone(),
        algorithm,
        margin,
        element: Code::E4M3,
    };
    let jobs = vec![
        job(0, AmaxAlgorithm::Max, 0),
        job(1, AmaxAlgorithm::MostRecent, 1),
        // A step that saw only zeros changes nothing.
        job(2, AmaxAlgorithm::Max, 0),
    ];
    rig.run(Work::History(jobs.clone()));
    assert_eq!(rig.content::<f32>(&scales), [448.0 / 5.0, 224.0 / 6.0, 7.0]);
    assert_eq!(rig.content::<f32>(&observed), [0.0; 3]);
    let expected = [
        vec![0.0, 1.0, 3.0],
        vec![0.0, 1.0, 100.0, 6.0],
        vec![0.0, 8.0],
    ];
    for (found, expected) in histories.iter().zip(expected) {
        assert_eq!(rig.content::<f32>(found), expected);
    }

    let twice = vec![jobs[1].clone(), jobs[1].clone()];
    assert!(matches!(
        rig.plan(Work::History(twice)),
        Err(KernelError::Aliased { other: 0, .. })
    ));
    let empty = HistoryJob {
        history: rig.buffer::<f32>(&[]),
        ..jobs[0].clone()
    };
    assert!(matches!(
        rig.plan(Work::History(vec![empty])),
        Err(KernelError::Missing { .. })
    ));
    for element in Code::ALL {
        let other = HistoryJob {
            element,
            ..jobs[0].clone()
        };
        let planned = rig.plan(Work::History(vec![other])).map(|_| ());
        let scaled = [Code::E4M3, Code::E5M2, Code::E2M1].contains(&element);
        let expected = match scaled {
            true => Ok(()),
            false => Err(KernelError::DelayedElement { element }),
        };
        assert_eq!(planned, expected);
    }
}
