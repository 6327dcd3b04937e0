//! Generated histories of a node, with crashes, reboots and drivers that come, go, refuse and answer late.

use proptest::prelude::*;

use super::super::fixtures::driver;
use super::node::{Crash, EffectOutcome, Node};
use super::requests::{CLAIMS, Request, claims, driver_of, pods, request};
use crate::manager::claims::machine::{Holder, UnprepareRequest};

#[derive(Debug, Clone)]
enum Event {
    Request {
        request: Request,
        outcomes: Vec<EffectOutcome>,
    },
    Resume {
        outcomes: Vec<EffectOutcome>,
    },
    Restart,
    Reboot,
    Serving {
        driver: usize,
        serves: bool,
    },
}

const DRIVERS: [&str; 3] = ["gpu", "nic", "net"];

fn outcomes() -> impl Strategy<Value = Vec<EffectOutcome>> {
    let one = prop_oneof![
        8 => Just(EffectOutcome::Good),
        2 => Just(EffectOutcome::Refused),
        2 => Just(EffectOutcome::Later),
        2 => Just(EffectOutcome::TooLateDone),
        1 => Just(EffectOutcome::CrashBefore),
        1 => Just(EffectOutcome::CrashAfter),
    ];
    prop::collection::vec(one, 0..10)
}

fn event() -> impl Strategy<Value = Event> {
    prop_oneof![
        31 => (request(CLAIMS.len()), outcomes()).prop_map(|(request, outcomes)| Event::Request { request, outcomes }),
        2 => outcomes().prop_map(|outcomes| Event::Resume { outcomes }),
        1 => Just(Event::Restart),
        1 => Just(Event::Reboot),
        2 => (0..DRIVERS.len(), any::<bool>()).prop_map(|(driver, serves)| Event::Serving { driver, serves }),
    ]
}

fn carry_out(node: &mut Node, request: &Request) -> Result<(), Crash> {
    let (pods, claims) = (pods(), claims());
    match request {
        Request::Prepare {
            pod,
            claims: wanted,
        } => {
            let wanted: Vec<_> = wanted.iter().map(|index| &claims[*index]).collect();
            node.prepare(Holder::Pod(&pods[*pod]), &wanted)
        }
        Request::Unprepare { pod } => node.unprepare(&pods[*pod].uid),
        Request::Release { claim } => node.release(&claims[*claim].id.uid),
        Request::KubeletPrepare { claim, part } => {
            let claim = &claims[*claim];
            node.prepare(
                Holder::Kubelet {
                    driver: &driver_of(claim, *part),
                    given: false,
                },
                &[claim],
            )
        }
        Request::KubeletUnprepare { claim, part } => {
            let claim = &claims[*claim];
            let driver = part.map(|part| driver_of(claim, part));
            let by = UnprepareRequest::Kubelet {
                driver: driver.as_ref(),
                cause: "kubelet",
            };
            node.unprepare_claims(std::slice::from_ref(&claim.id.uid), by)
        }
        Request::EarlyPrepare { claim, part } => {
            let claim = &claims[*claim];
            node.prepare(
                Holder::Early {
                    driver: &driver_of(claim, *part),
                },
                &[claim],
            )
        }
        Request::EarlyUnprepare { claim } => {
            let by = UnprepareRequest::Early {
                cause: "not nominated",
            };
            node.unprepare_claims(std::slice::from_ref(&claims[*claim].id.uid), by)
        }
    }
}

fn happen(node: &mut Node, event: &Event) {
    let end = match event {
        Event::Request { request, outcomes } => {
            node.set_outcomes(outcomes);
            carry_out(node, request)
        }
        Event::Resume { outcomes } => {
            node.set_outcomes(outcomes);
            node.resume()
        }
        Event::Restart => Err(Crash),
        Event::Reboot => {
            node.reboot();
            Ok(())
        }
        Event::Serving {
            driver: index,
            serves,
        } => {
            node.set_serving(&driver(DRIVERS[*index]), *serves);
            Ok(())
        }
    };
    if end.is_err() {
        node.restart();
    }
}

/// Faults stop, drivers come back, the kubelet unprepares the parts that it uses, and every pod leaves.
fn settle(node: &mut Node) {
    node.set_outcomes(&[]);
    DRIVERS
        .iter()
        .for_each(|name| node.set_serving(&driver(name), true));
    assert!(node.resume().is_ok());
    for claim in 0..CLAIMS.len() {
        assert!(carry_out(node, &Request::KubeletUnprepare { claim, part: None }).is_ok());
    }
    for pod in node.pods() {
        assert!(node.unprepare(&pod).is_ok());
    }
    node.assert_sound();
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn histories_preserve_claims_and_durability(
        events in prop::collection::vec(event(), 1..40),
    ) {
        let mut node = Node::new(DRIVERS.map(driver));
        for event in &events {
            happen(&mut node, event);
            node.assert_sound();
            pods().iter().for_each(|pod| node.assert_others_take_nothing(&pod.uid));
        }
        settle(&mut node);
        node.assert_empty();
    }
}
