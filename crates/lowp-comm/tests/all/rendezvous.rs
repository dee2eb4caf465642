//! Processes that find each other, or say why not: on every rank, within the limit, naming the one that is wrong.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use crate::common::{PATIENCE, launches};
use lowp_comm::{CommError, Control, Launch, join};

type Joined = Result<Arc<dyn Control>, CommError>;

/// What is wrong about a rank.
type Change = fn(&mut Launch);

/// Joins all `launches` at once.
fn join_all(launches: Vec<Launch>) -> Vec<Joined> {
    thread::scope(|scope| {
        let start = |launch: Launch| scope.spawn(move || join(&launch));
        let ranks: Vec<_> = launches.into_iter().map(start).collect();
        let ranks = ranks.into_iter();
        ranks.map(|rank| rank.join().expect("no panic")).collect()
    })
}

/// The texts of a rendezvous that must fail on all ranks, long before `limit` if it is found at once.
fn failing(launches: Vec<Launch>) -> Vec<String> {
    let begun = Instant::now();
    let limit = launches[0].limit;
    let texts = join_all(launches).into_iter().map(|joined| match joined {
        Ok(rank) => panic!("rank {} is in a world", rank.rank()),
        Err(error) => error.to_string(),
    });
    let texts = texts.collect();
    assert!(
        begun.elapsed() < limit + Duration::from_secs(8),
        "{:?}",
        begun.elapsed()
    );
    texts
}

#[test]
fn ranks_find_each_other_in_any_order() {
    for world in [1, 2, 5] {
        let launches = launches(world, PATIENCE);
        let sums = thread::scope(|scope| {
            let start = |launch: Launch| {
                scope.spawn(move || {
                    // Rank 0 comes last.
                    thread::sleep(Duration::from_millis(20 * (world - launch.rank) as u64));
                    let control = join(&launch).expect("a world");
                    assert_eq!(control.rank(), launch.rank);
                    assert_eq!(control.members(), (0..world).collect::<Vec<_>>());
                    let mut sum = [launch.rank as f64];
                    control.sum(&mut sum).expect("a sum");
                    let first = control.broadcast("it", vec![launch.rank as u8]);
                    assert_eq!(first, Ok(vec![0]));
                    sum[0]
                })
            };
            let ranks: Vec<_> = launches.into_iter().map(start).collect();
            let ranks = ranks.into_iter();
            ranks
                .map(|rank| rank.join().expect("no panic"))
                .collect::<Vec<_>>()
        });
        let expected = (0..world).sum::<usize>() as f64;
        assert_eq!(sums, vec![expected; world]);
    }
}

#[test]
fn a_missing_rank_is_named_on_all() {
    let mut launches = launches(4, Duration::from_secs(3));
    launches.remove(2);
    let begun = Instant::now();
    for text in failing(launches) {
        assert!(text.contains("rendezvous at 127.0.0.1:"), "{text}");
        assert!(
            text.contains("waited 3.0 s for ranks [2], which did not join"),
            "{text}"
        );
        assert!(text.contains("the time limit, `timeout`"), "{text}");
    }
    // Nobody waits on.
    assert!(
        begun.elapsed() < Duration::from_secs(5),
        "{:?}",
        begun.elapsed()
    );
}

/// A rank that is not seen any more is waited for once, and not again to see it go.
#[test]
fn a_rank_that_is_stuck_is_not_waited_for_again() {
    let launches = launches(3, Duration::from_secs(1));
    let (stuck, free) = std::sync::mpsc::channel::<()>();
    let ended = thread::scope(|scope| {
        let rank = |launch: Launch| move || join(&launch).expect("a world");
        let mut launches = launches.into_iter().map(rank);
        let mut next = || launches.next().expect("a launch");
        let (first, second, third) = (next(), next(), next());
        scope.spawn(move || {
            let world = third();
            // Until everybody else is gone.
            let _gone = free.recv();
            drop(world);
        });
        let ranks: [Box<dyn FnOnce() -> Arc<dyn Control> + Send>; 2] =
            [Box::new(first), Box::new(second)];
        let ranks = ranks.map(|rank| {
            scope.spawn(move || {
                let world = rank();
                let begun = Instant::now();
                let error = world.barrier().expect_err("a rank is stuck").to_string();
                drop(world);
                (error, begun.elapsed())
            })
        });
        let ended = ranks.map(|rank| rank.join().expect("no panic"));
        drop(stuck);
        ended
    });
    for (error, time) in ended {
        assert!(error.contains("waited 1.0 s for ranks [2]"), "{error}");
        assert!(time < Duration::from_secs(4), "{error}: {time:?}");
    }
}

#[test]
fn a_missing_first_rank_is_named_on_all() {
    let mut launches = launches(3, Duration::from_millis(300));
    launches.remove(0);
    for text in failing(launches) {
        assert!(text.contains("rank 0 was not there for 0."), "{text}");
    }
}

#[test]
fn another_world_build_or_rank_is_named_on_all() {
    let changes: [(Change, &str); 3] = [
        (
            |launch| launch.world = 4,
            "it was started for a world of 4 ranks, and rank 0 for 3",
        ),
        (
            |launch| launch.build = "0.0.9".to_owned(),
            "it runs build 0.0.9, and rank 0 tests",
        ),
        (
            |launch| launch.rank = 1,
            "two processes say they are rank 1",
        ),
    ];
    for (change, expected) in changes {
        let mut launches = launches(3, PATIENCE);
        change(&mut launches[2]);
        for text in failing(launches) {
            assert!(text.contains(expected), "{text}");
        }
    }
}

#[test]
fn a_port_in_use_is_named_on_all() {
    let launches = launches(2, Duration::from_millis(500));
    let port = launches[0].port;
    // Something that listens, and speaks something else.
    let other = TcpListener::bind(("127.0.0.1", port)).expect("the port");
    thread::spawn(move || {
        for mut stream in other.incoming().flatten() {
            let _gone = stream.write_all(b"HTTP/1.1 400 Bad Request\r\n\r\n");
        }
    });
    let texts = failing(launches);
    assert!(
        texts[0].contains(&format!("port {port} is in use by another process")),
        "{}",
        texts[0]
    );
    assert!(
        texts[1].contains("what listens there is not rank 0 of lowp"),
        "{}",
        texts[1]
    );
}

#[test]
fn strangers_do_no_harm() {
    let launches = launches(2, PATIENCE);
    let port = launches[0].port;
    let noise: [&[u8]; 4] = [b"", b"GET / HTTP/1.1\r\n\r\n", b"lowp", &[255; 64]];
    let stop = thread::spawn(move || {
        for noise in noise {
            // Rank 0 may not listen yet.
            for _ in 0..200 {
                if let Ok(mut stream) = TcpStream::connect(("127.0.0.1", port)) {
                    let _gone = stream.write_all(noise);
                    break;
                }
                thread::sleep(Duration::from_millis(5));
            }
        }
    });
    let late = launches[1].clone();
    let host = thread::spawn(move || join(&launches[0]));
    stop.join().expect("no panic");
    let rank = join(&late).expect("a world");
    let host = host.join().expect("no panic").expect("a world");
    let host = thread::spawn(move || host.barrier());
    assert_eq!(rank.barrier(), Ok(()));
    drop(rank);
    assert_eq!(host.join().expect("no panic"), Ok(()));
}

#[test]
fn another_protocol_is_named_on_all() {
    let launches = launches(2, PATIENCE);
    let address = launches[0].address();
    let host = thread::spawn(move || join(&launches[0]).map(drop));
    let mut stream = loop {
        match TcpStream::connect(&address) {
            Ok(stream) => break stream,
            Err(_) => thread::sleep(Duration::from_millis(5)),
        }
    };
    stream.write_all(b"lowp\0\x63\0\0").expect("a greeting");
    let mut greeting = [0; 8];
    stream.read_exact(&mut greeting).expect("a greeting");
    assert_eq!(&greeting[..4], b"lowp");
    let error = host
        .join()
        .expect("no panic")
        .expect_err("another protocol");
    assert!(
        error
            .to_string()
            .contains("speaks protocol 99 and rank 0 4"),
        "{error}"
    );
}

/// A world of three whose last rank does what `end` says with its connection: the errors of the others.
fn with_a_bare_rank(end: impl FnOnce(TcpStream)) -> Vec<String> {
    let launches = launches(3, PATIENCE);
    let address = launches[0].address();
    let others: Vec<_> = launches[..2]
        .iter()
        .cloned()
        .map(|launch| thread::spawn(move || join(&launch).and_then(|rank| rank.barrier())))
        .collect();
    let mut stream = loop {
        match TcpStream::connect(&address) {
            Ok(stream) => break stream,
            Err(_) => thread::sleep(Duration::from_millis(5)),
        }
    };
    stream.set_nodelay(true).expect("a socket");
    let body =
        postcard::to_stdvec(&(2usize, 3usize, "tests", "", 0u64, 2usize, 0u16)).expect("a hello");
    let len = (body.len() as u32).to_le_bytes();
    // In as many parts as there can be.
    for byte in [b"lowp\0\x04\0\0".as_slice(), &len, &body].concat() {
        stream.write_all(&[byte]).expect("a byte");
        thread::sleep(Duration::from_millis(1));
    }
    let mut ready = [0; 8 + 4 + 1];
    stream.read_exact(&mut ready).expect("ready");
    end(stream);
    let error = |other: thread::JoinHandle<Result<(), CommError>>| {
        let error = other.join().expect("no panic").expect_err("a rank is gone");
        error.to_string()
    };
    others.into_iter().map(error).collect()
}

/// A connection that closes without a word, as that of a killed process.
#[test]
fn a_killed_rank_is_lost() {
    for text in with_a_bare_rank(drop) {
        assert!(text.contains("rank 2 lost its connection"), "{text}");
    }
}

/// Frames that are too long, mean nothing, or name what is not there.
#[test]
fn what_is_no_message_is_named() {
    let frames: [&[u8]; 3] = [
        &[255; 64],
        &[2, 0, 0, 0, 99, 99],
        // It closes a group that nobody made.
        &[3, 0, 0, 0, 1, 77, 0],
    ];
    for frame in frames {
        let texts = with_a_bare_rank(|mut stream| {
            stream.write_all(frame).expect("a frame");
            // Until rank 0 says what it thinks of it.
            let _gone = stream.read(&mut [0; 64]);
        });
        for text in texts {
            assert!(text.contains("rank 2 failed: rank 0 heard "), "{text}");
        }
    }
}

/// A launch of `run` that was started again `restart` times.
fn of_run(launch: &Launch, run: &str, restart: u64) -> Launch {
    Launch {
        run: run.to_owned(),
        restart,
        ..launch.clone()
    }
}

/// The error of a rank that is sent away, long before the limit.
fn sent_away(launch: &Launch) -> String {
    let begun = Instant::now();
    let error = join(launch).expect_err("another run").to_string();
    assert!(begun.elapsed() < PATIENCE / 4, "{error}");
    error
}

/// Ranks of another job on the port, before and after the right ones have met, get an error, and the right ones meet all the same.
#[test]
fn a_rank_of_another_run_is_sent_away() {
    let launches = launches(3, PATIENCE);
    let right: Vec<Launch> = launches.iter().map(|l| of_run(l, "job 7", 0)).collect();
    let wrong = of_run(&launches[1], "job 6", 0);
    thread::scope(|scope| {
        let first = right[0].clone();
        let host = scope.spawn(move || join(&first));
        let early = sent_away(&wrong);
        let others: Vec<_> = right[1..]
            .iter()
            .map(|launch| scope.spawn(move || join(launch).expect("a world")))
            .collect();
        let others: Vec<_> = others.into_iter().map(|rank| rank.join()).collect();
        let late = sent_away(&wrong);
        let again = sent_away(&right[1]);
        for text in [early, late] {
            let expected = "rank 0 there is of run 'job 7', and this rank of run 'job 6'";
            assert!(text.contains(expected), "{text}");
        }
        assert!(
            again.contains("all ranks of the run are there already"),
            "{again}"
        );
        let host = host.join().expect("no panic").expect("a world");
        let meet = |rank: Arc<dyn Control>| scope.spawn(move || rank.barrier());
        let mut met = vec![meet(host)];
        met.extend(others.into_iter().map(|rank| meet(rank.expect("no panic"))));
        for rank in met {
            assert_eq!(rank.join().expect("no panic"), Ok(()));
        }
    });
}

/// Of two processes of one rank the one that was started later is it, whichever comes first.
#[test]
fn an_earlier_start_of_a_rank_is_sent_away() {
    let launches = launches(3, PATIENCE);
    thread::scope(|scope| {
        let mut ranks = Vec::new();
        // Each machine counts its restarts by itself.
        let first = of_run(&launches[0], "run", 0);
        ranks.push(scope.spawn(move || join(&first).and_then(|rank| rank.barrier())));
        let stale = of_run(&launches[1], "run", 1);
        let (tell, heard) = std::sync::mpsc::channel();
        scope.spawn(move || {
            let stale = join(&stale).map(drop);
            // The test may be over.
            let _gone = tell.send(stale.expect_err("an earlier start").to_string());
        });
        let newer = of_run(&launches[1], "run", 2);
        thread::sleep(Duration::from_millis(100));
        ranks.push(scope.spawn(move || join(&newer).and_then(|rank| rank.barrier())));
        let replaced = heard.recv_timeout(PATIENCE).expect("its error");
        let late = sent_away(&of_run(&launches[1], "run", 1));
        for text in [replaced, late] {
            let expected = "this rank is of restart 1, and one of restart 2 has its place";
            assert!(text.contains(expected), "{text}");
        }
        let last = of_run(&launches[2], "run", 0);
        ranks.push(scope.spawn(move || join(&last).and_then(|rank| rank.barrier())));
        for rank in ranks {
            assert_eq!(rank.join().expect("no panic"), Ok(()));
        }
    });
}

/// A rank that starts again ends the world of the earlier start, and meets the others when they have started again, too.
#[test]
fn a_rank_that_starts_again_waits_for_the_others() {
    let launches = launches(2, PATIENCE);
    let join_both = |restart: u64| {
        let both = launches.iter().map(|launch| {
            let launch = of_run(launch, "run", restart);
            thread::spawn(move || join(&launch))
        });
        both.collect::<Vec<_>>()
    };
    let ranks: Vec<_> = join_both(0)
        .into_iter()
        .map(|rank| rank.join().expect("no panic").expect("a world"))
        .collect();
    let again = of_run(&launches[1], "run", 1);
    let again = thread::spawn(move || join(&again));
    for rank in ranks {
        let error = loop {
            match rank.failure() {
                Some(error) => break error.to_string(),
                None => thread::sleep(Duration::from_millis(1)),
            }
        };
        assert!(error.contains("rank 1 lost its connection"), "{error}");
        thread::spawn(move || drop(rank));
    }
    let host = of_run(&launches[0], "run", 1);
    let host = loop {
        // Until the rank 0 before has given the port back.
        match join(&host) {
            Ok(host) => break host,
            Err(error) => assert!(error.to_string().contains("is in use"), "{error}"),
        }
        thread::sleep(Duration::from_millis(5));
    };
    let again = again.join().expect("no panic").expect("a world");
    let host = thread::spawn(move || host.barrier());
    assert_eq!(again.barrier(), Ok(()));
    // Rank 0 waits for it to go.
    drop(again);
    assert_eq!(host.join().expect("no panic"), Ok(()));
}
