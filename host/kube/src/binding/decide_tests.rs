use proptest::prelude::*;

use super::*;
use nodedock_model::{
    BindingConditions, Consumer, DeviceName, ObjectName, ObjectRef, PoolName, ProblemCode,
};

const GPU: &str = "gpu.example.com";

fn uid(text: &str) -> Uid {
    Uid::new(text).unwrap()
}

fn driver() -> DriverName {
    DriverName::new(GPU).unwrap()
}

fn consumer(resource: &str) -> Consumer {
    let (name, uid) = (ObjectName::new("a").unwrap(), uid("pod-a"));
    Consumer {
        api_group: String::new(),
        resource: resource.to_owned(),
        name,
        uid,
    }
}

fn binding() -> BindingConditions {
    BindingConditions {
        conditions: vec![BindingConditions::PREPARED.to_owned()],
        failures: vec![
            "example.com/failed".to_owned(),
            BindingConditions::PREPARE_FAILED.to_owned(),
        ],
    }
}

fn allocation(device: &str) -> Allocation {
    let device = AllocatedDevice {
        request: "gpu".to_owned(),
        driver: driver(),
        pool: PoolName::new("gpus").unwrap(),
        device: DeviceName::new(device).unwrap(),
        share_id: None,
        consumed: Default::default(),
        admin_access: false,
        binding: binding(),
    };
    Allocation {
        devices: vec![device],
        ..Allocation::default()
    }
}

fn scheduled(device: &str, allocated_ms: u64, reserved_for: Vec<Consumer>) -> ScheduledClaim {
    let claim = Claim {
        id: ObjectRef::new("default", "one", "uid-one").unwrap(),
        allocation: Some(allocation(device)),
        reserved_for,
        annotations: Default::default(),
        owner_pod: None,
        resource: None,
    };
    ScheduledClaim {
        claim,
        allocated_ms,
        awaited: [driver()].into(),
    }
}

fn here(claim: ScheduledClaim) -> ClaimSeen {
    ClaimSeen::Here(Box::new(claim))
}

/// A look at a claim that is allocated to `gpu-0` and reserved for the pod that is nominated.
fn wanted(held: Held) -> ClaimObservation {
    ClaimObservation {
        nominated: [uid("pod-a")].into(),
        claim: here(scheduled("gpu-0", 7, vec![consumer("pods")])),
        held,
        consumers: Consumers::Unknown,
    }
}

fn early(device: &str) -> Held {
    Held::Early {
        uid: uid("uid-one"),
        allocation: allocation(device),
    }
}

fn refused(problem: Problem) -> Result<(), (DriverName, Problem)> {
    Err((driver(), problem))
}

fn invalid() -> Problem {
    Problem::invalid(ProblemCode::BadValue, "no such profile")
}

fn unavailable() -> Problem {
    Problem::unavailable(ProblemCode::DriverNotServing, "it is not there")
}

fn release(why: Why) -> Step {
    Step::Release(uid("uid-one"), why)
}

#[test]
fn claim_is_prepared_for_waiting_scheduler() {
    let now = Instant::now();
    let unreserved = here(scheduled("gpu-0", 7, vec![]));
    let not_ours = here(ScheduledClaim {
        awaited: BTreeSet::new(),
        ..scheduled("gpu-0", 7, vec![consumer("pods")])
    });
    let of_group = here(scheduled("gpu-0", 7, vec![consumer("podgroups")]));
    let none = BTreeSet::new();
    let pod = wanted(Held::Free).nominated;
    let idle = Step::Wait(IDLE_LOOK);
    let soon = Step::Wait(LOOK_MIN);
    for (claim, nominated, held, expected) in [
        (wanted(Held::Free).claim, &pod, Held::Free, Step::Prepare),
        (of_group, &pod, Held::Free, Step::Prepare),
        (unreserved, &pod, Held::Free, soon.clone()),
        (ClaimSeen::NotHere, &pod, Held::Free, soon.clone()),
        (ClaimSeen::Gone, &pod, Held::Free, soon.clone()),
        (ClaimSeen::Unknown, &pod, Held::Free, soon),
        (not_ours, &pod, Held::Free, idle.clone()),
        (wanted(Held::Free).claim, &pod, Held::Kubelet, idle),
        (wanted(Held::Free).claim, &none, Held::Free, Step::Forget),
        (wanted(Held::Free).claim, &none, Held::Kubelet, Step::Forget),
        (ClaimSeen::Gone, &none, Held::Free, Step::Forget),
    ] {
        let seen = ClaimObservation {
            nominated: nominated.clone(),
            claim,
            held,
            consumers: Consumers::Unknown,
        };
        assert_eq!(Tracked::default().step(&seen, now), expected, "{seen:?}");
    }
}

#[test]
fn only_surely_unneeded_claims_are_released() {
    let now = Instant::now();
    let alone = |claim, consumers| ClaimObservation {
        nominated: BTreeSet::new(),
        claim,
        held: early("gpu-0"),
        consumers,
    };
    let same = || here(scheduled("gpu-0", 7, vec![]));
    let mut other = scheduled("gpu-0", 7, vec![]);
    other.claim.id = ObjectRef::new("default", "one", "uid-newer").unwrap();
    for (seen, expected) in [
        (
            alone(ClaimSeen::Gone, Consumers::Unknown),
            release(Why::Gone),
        ),
        (alone(here(other), Consumers::Unknown), release(Why::Gone)),
        (
            alone(ClaimSeen::NotHere, Consumers::Unknown),
            release(Why::NotAllocated),
        ),
        (
            alone(here(scheduled("gpu-1", 7, vec![])), Consumers::Unknown),
            release(Why::OtherAllocation),
        ),
        (alone(same(), Consumers::Gone), release(Why::NoPods)),
        (alone(same(), Consumers::Unknown), Step::Wait(LOOK_MIN)),
        (
            alone(ClaimSeen::Unknown, Consumers::Gone),
            Step::Wait(LOOK_MIN),
        ),
        (alone(same(), Consumers::Bound), Step::Wait(IDLE_LOOK)),
        (alone(same(), Consumers::Waiting), Step::Wait(IDLE_LOOK)),
    ] {
        assert_eq!(Tracked::default().step(&seen, now), expected, "{seen:?}");
    }
    // Another pod that names it is nominated, and it is reserved for one that is bound here.
    let shared = |consumers| ClaimObservation {
        nominated: [uid("pod-b")].into(),
        ..alone(same(), consumers)
    };
    for consumers in [Consumers::Bound, Consumers::Gone] {
        let mut tracked = Tracked::default();
        assert_eq!(tracked.step(&shared(consumers), now), Step::Wait(IDLE_LOOK));
        let is_bound = consumers == Consumers::Bound;
        let expected = if is_bound {
            Step::Wait(IDLE_LOOK)
        } else {
            release(Why::Withdrawn)
        };
        assert_eq!(
            tracked.step(&shared(consumers), now + WITHDRAWN_GRACE),
            expected
        );
    }
    // A pod that is nominated again within the grace finds it prepared.
    let (mut tracked, waiting) = (Tracked::default(), alone(same(), Consumers::Waiting));
    tracked.step(&waiting, now);
    assert_eq!(
        tracked.step(&wanted(early("gpu-0")), now + WITHDRAWN_GRACE / 2),
        Step::Prepare
    );
    tracked.prepared(Ok(()), now + WITHDRAWN_GRACE / 2);
    let later = now + WITHDRAWN_GRACE;
    assert_eq!(
        tracked.step(&waiting, later),
        Step::Wait(IDLE_LOOK),
        "the grace begins again"
    );
    assert_eq!(
        tracked.step(&waiting, later + WITHDRAWN_GRACE),
        release(Why::Withdrawn)
    );
    tracked.released(later + WITHDRAWN_GRACE);
    assert_eq!(
        tracked.statuses().unwrap().devices,
        [],
        "its condition is removed"
    );
    let released = ClaimObservation {
        held: Held::Free,
        ..waiting
    };
    assert_eq!(
        tracked.step(&released, later + WITHDRAWN_GRACE),
        Step::Wait(IDLE_LOOK)
    );
    assert_eq!(
        tracked.step(&released, later + WITHDRAWN_GRACE + OUTCOME_KEPT),
        Step::Forget
    );
}

#[test]
fn prepare_failure_is_reported_until_reallocation() {
    let (now, mut tracked) = (Instant::now(), Tracked::default());
    assert_eq!(tracked.step(&wanted(Held::Free), now), Step::Prepare);
    tracked.prepared(refused(invalid()), now);
    assert_eq!(
        tracked.step(&wanted(early("gpu-0")), now),
        release(Why::Refused),
        "a driver may have begun"
    );
    tracked.released(now);
    let statuses = tracked.statuses().unwrap();
    let condition = &statuses.devices[0].status.conditions[0];
    assert_eq!((statuses.allocated_ms, statuses.devices.len()), (7, 1));
    assert_eq!(
        (condition.kind.as_str(), condition.status),
        (BindingConditions::PREPARE_FAILED, Some(true))
    );
    assert_eq!(
        (condition.reason.as_str(), condition.message.as_str()),
        ("BadValue", "no such profile")
    );
    assert_eq!(
        tracked.step(&wanted(Held::Free), now),
        Step::Wait(IDLE_LOOK)
    );
    // The same device in another allocation.
    let again = ClaimObservation {
        claim: here(scheduled("gpu-0", 8, vec![consumer("pods")])),
        ..wanted(Held::Free)
    };
    assert_eq!(tracked.step(&again, now), Step::Prepare);
    assert_eq!(tracked.statuses().unwrap().devices, []);
    assert!(tracked.failure().is_none());
}

#[test]
fn early_prepare_retries_before_it_fails() {
    let (start, mut tracked) = (Instant::now(), Tracked::default());
    let (mut now, mut attempts) = (start, 0);
    while tracked.failure().is_none() {
        match tracked.step(&wanted(early("gpu-0")), now) {
            Step::Prepare => {
                attempts += 1;
                now += tracked.prepared(refused(unavailable()), now);
            }
            Step::Wait(delay) => now += delay,
            other => panic!("{other:?}"),
        }
    }
    let took = now - start;
    assert!(
        (EARLY_PREPARE_MAX..EARLY_PREPARE_MAX + LOOK_MAX).contains(&took),
        "{took:?}"
    );
    assert!((10..25).contains(&attempts), "{attempts}");
    assert!(is_of_device(&unavailable()) && !is_of_device(&invalid()));
}

/// A cluster with one claim, one pod and one node that crashes.
struct World {
    now: Instant,
    nominated: bool,
    pod: Consumers,
    reserved: bool,
    /// The device, and the time of the allocation.
    allocated: Option<(&'static str, u64)>,
    allocations: u64,
    held: Held,
    works: Option<Problem>,
    tracked: Option<Tracked>,
}

#[derive(Debug, Clone)]
enum Event {
    Nominate(bool),
    Allocate(&'static str),
    Unreserve,
    Deallocate,
    Bind,
    Delete,
    KubeletPrepares,
    KubeletUnprepares,
    Driver(Option<Problem>),
    Crash,
    Pass(u64),
    Look { is_read: bool },
}

fn event() -> impl Strategy<Value = Event> {
    prop_oneof![
        3 => any::<bool>().prop_map(Event::Nominate),
        3 => prop_oneof![Just("gpu-0"), Just("gpu-1")].prop_map(Event::Allocate),
        1 => Just(Event::Unreserve),
        2 => Just(Event::Deallocate),
        1 => Just(Event::Bind),
        1 => Just(Event::Delete),
        2 => Just(Event::KubeletPrepares),
        1 => Just(Event::KubeletUnprepares),
        2 => prop_oneof![Just(None), Just(Some(invalid())), Just(Some(unavailable()))].prop_map(Event::Driver),
        1 => Just(Event::Crash),
        3 => (0..400u64).prop_map(Event::Pass),
        12 => prop::bool::weighted(0.9).prop_map(|is_read| Event::Look { is_read }),
    ]
}

impl World {
    fn new() -> Self {
        Self {
            now: Instant::now(),
            nominated: false,
            pod: Consumers::Waiting,
            reserved: false,
            allocated: None,
            allocations: 0,
            held: Held::Free,
            works: None,
            tracked: None,
        }
    }

    fn happen(&mut self, event: &Event) {
        match event {
            Event::Nominate(nominated) => {
                self.nominated = *nominated && self.pod == Consumers::Waiting
            }
            Event::Allocate(device)
                if self.allocated.is_none() && self.pod == Consumers::Waiting =>
            {
                self.allocations += 1;
                (self.allocated, self.reserved) = (Some((*device, self.allocations)), true);
            }
            Event::Unreserve => self.reserved &= self.pod == Consumers::Bound,
            Event::Deallocate if self.pod != Consumers::Bound => {
                (self.allocated, self.reserved) = (None, false);
            }
            Event::Bind if self.reserved && self.pod == Consumers::Waiting => {
                (self.pod, self.nominated) = (Consumers::Bound, false);
            }
            Event::Delete => (self.pod, self.nominated) = (Consumers::Gone, false),
            Event::KubeletPrepares if self.pod == Consumers::Bound => self.held = Held::Kubelet,
            Event::KubeletUnprepares
                if self.held == Held::Kubelet && self.pod == Consumers::Gone =>
            {
                self.held = Held::Free;
            }
            Event::Driver(problem) => self.works = problem.clone(),
            // It lists what was prepared early, and the nominated pods.
            Event::Crash => self.tracked = None,
            Event::Pass(seconds) => self.now += Duration::from_secs(*seconds),
            Event::Look { is_read } => drop(self.look(*is_read)),
            _ => {}
        }
    }

    fn seen(&self, is_read: bool) -> ClaimObservation {
        let reserved_for = if self.reserved {
            vec![consumer("pods")]
        } else {
            vec![]
        };
        let claim = match self.allocated {
            _ if !is_read => ClaimSeen::Unknown,
            None => ClaimSeen::NotHere,
            Some((device, time)) => here(scheduled(device, time, reserved_for)),
        };
        let nominated = if self.nominated {
            [uid("pod-a")].into()
        } else {
            BTreeSet::new()
        };
        ClaimObservation {
            nominated,
            claim,
            held: self.held.clone(),
            consumers: self.pod,
        }
    }

    /// Looks at the claim as the task does. Returns when it is to be looked at again.
    fn look(&mut self, is_read: bool) -> Option<Duration> {
        let is_early = matches!(self.held, Held::Early { .. });
        if self.tracked.is_none() && !is_early && !self.nominated {
            return None;
        }
        let (seen, now) = (self.seen(is_read), self.now);
        let tracked = self.tracked.get_or_insert_default();
        let is_awaited = self.nominated && self.reserved && self.allocated.is_some();
        match tracked.step(&seen, now) {
            Step::Forget => {
                assert!(!is_early && !self.nominated, "it is left behind");
                self.tracked = None;
                None
            }
            Step::Wait(delay) => Some(delay),
            Step::Prepare => {
                assert!(is_awaited && self.held != Held::Kubelet);
                let Some((device, _)) = self.allocated else {
                    unreachable!("it is awaited")
                };
                match self.works.clone() {
                    None => {
                        assert!(
                            !is_early || self.held == early(device),
                            "the claim has another device"
                        );
                        self.held = early(device);
                        Some(tracked.prepared(Ok(()), now))
                    }
                    Some(problem) => {
                        // What it has begun stays until it is unprepared, unless it refused for good.
                        if !is_early && !problem.kind.is_permanent() {
                            self.held = early(device);
                        }
                        Some(tracked.prepared(refused(problem), now))
                    }
                }
            }
            Step::Release(of, why) => {
                let Held::Early { uid, allocation } = &self.held else {
                    panic!("it is not ours: {why:?}")
                };
                assert_eq!(of, *uid);
                let is_current = self
                    .allocated
                    .is_some_and(|(device, _)| *allocation == self::allocation(device));
                assert!(
                    !is_awaited || !is_current || why == Why::Refused,
                    "a scheduler waits for it: {why:?}"
                );
                assert!(
                    !(is_current && self.pod == Consumers::Bound),
                    "its pod is here: {why:?}"
                );
                self.held = Held::Free;
                tracked.released(now);
                Some(Duration::ZERO)
            }
        }
    }

    /// Looks as often as the task would.
    fn pass(&mut self, time: Duration) {
        let end = self.now + time;
        while self.now < end {
            let Some(delay) = self.look(true) else { return };
            self.now += delay.max(Duration::from_millis(1));
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn early_claims_never_leak_or_stall(
        events in prop::collection::vec(event(), 1..60),
    ) {
        let mut world = World::new();
        for event in &events {
            world.happen(event);
        }
        // The driver works, and a scheduler waits for the claim of an unbound pod.
        if world.pod == Consumers::Waiting && world.held != Held::Kubelet {
            world.happen(&Event::Driver(None));
            world.happen(&Event::Deallocate);
            world.happen(&Event::Nominate(true));
            world.happen(&Event::Allocate("gpu-1"));
            world.pass(Duration::from_secs(60));
            prop_assert_eq!(&world.held, &early("gpu-1"));
        }
        // The pod goes before a kubelet knows it.
        world.happen(&Event::Delete);
        world.happen(&Event::KubeletUnprepares);
        world.pass(OUTCOME_KEPT * 2);
        prop_assert_eq!(&world.held, &Held::Free);
        prop_assert!(world.tracked.is_none());
    }
}
