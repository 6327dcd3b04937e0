use proptest::prelude::*;

use super::*;

use Mechanism::{DevicePlugin, Dra};

fn resource() -> ExtendedResource {
    "example.com/gpu".parse().unwrap()
}

fn key() -> LocalPool {
    LocalPool {
        driver: "gpu.example.com".parse().unwrap(),
        pool: "gpus".parse().unwrap(),
    }
}

fn claim() -> ObjectRef {
    ObjectRef::new("default", "claim", "uid").unwrap()
}

fn decision(mechanism: Mechanism) -> Decision {
    Decision {
        mechanism,
        reason: "of the test".to_owned(),
    }
}

fn ready(is_ready: bool) -> Classes {
    Classes::Ready([resource()].into_iter().filter(|_| is_ready).collect())
}

fn claims(is_allocated: bool) -> ClaimsOfPools {
    let claims = is_allocated.then(|| (key(), [claim()].into()));
    claims.into_iter().collect()
}

fn record(mechanism: Mechanism) -> MechanismsRecord {
    let LocalPool { driver, pool } = key();
    MechanismsRecord {
        decided: Some(mechanism),
        pools: vec![PoolMechanism {
            driver,
            pool,
            resource: resource(),
            mechanism,
        }],
    }
}

/// A switch with the pool, for which classes do not matter.
fn switch(record: MechanismsRecord) -> Switch {
    let mut switch = Switch::new(record);
    switch.classes(Classes::NotNeeded);
    switch.name(true);
    switch
}

impl Switch {
    fn of(&self) -> Option<Mechanism> {
        let LocalPool { driver, pool } = key();
        self.mechanisms().of(&driver, &pool, true)
    }

    fn waits(&self) -> String {
        self.mechanisms().pools[&key()].waits_for.clone()
    }

    fn decide(&mut self, mechanism: Mechanism) {
        self.inputs.decision = Some(decision(mechanism));
        self.refresh();
    }

    fn classes(&mut self, classes: Classes) {
        self.inputs.classes = classes;
        self.refresh();
    }

    fn name(&mut self, is_named: bool) {
        self.inputs.pools = [(key(), is_named.then(resource))].into();
        self.refresh();
    }

    fn disable(&mut self, is_disabled: bool) {
        self.inputs.disabled = is_disabled.then(key).into_iter().collect();
        self.refresh();
    }

    /// Bridge and slices have carried out all until now; by these a device is in use.
    fn carried_out(&mut self, in_use: &[Mechanism]) {
        self.inputs.reported = Reported {
            lists: self.generation,
            slices: self.generation,
            published: BTreeSet::new(),
            in_use: [(key(), in_use.iter().copied().collect())].into(),
        };
        self.refresh();
    }

    fn commit(&mut self) {
        self.set_known(self.proposal());
    }
}

#[test]
fn new_pool_waits_for_other_mechanism() {
    let mut switch = switch(MechanismsRecord::default());
    assert_eq!(switch.waits(), "the versions of API server and kubelet");
    assert_eq!(switch.waiting(), [key()].into());
    switch.decide(DevicePlugin);
    assert_eq!(switch.waits(), "the deletion of its ResourceSlices");
    assert!(!switch.awaits_claims());
    switch.carried_out(&[]);
    assert!(switch.awaits_claims() && switch.proposal().pools.is_empty());
    switch.claims_read(claims(false));
    assert_eq!(switch.of(), None, "it is not durable");
    switch.commit();
    assert_eq!(switch.of(), Some(DevicePlugin));
    assert!(switch.waiting().is_empty() && !switch.awaits_claims());
}

#[test]
fn a_pool_in_use_stays() {
    let mut switch = switch(record(DevicePlugin));
    switch.carried_out(&[DevicePlugin]);
    switch.decide(Dra);
    assert_eq!(switch.of(), Some(DevicePlugin));
    assert_eq!(
        switch.waits(),
        "its devices to be free, to be offered by dra"
    );
    assert_eq!(switch.waiting(), [key()].into());
    let before = switch.generation;
    switch.carried_out(&[]);
    assert_eq!(switch.of(), None);
    switch.commit();
    assert_eq!(switch.of(), None, "an older withdrawal does not count");
    assert!(switch.generation > before);
    // An Allocate was faster.
    switch.carried_out(&[DevicePlugin]);
    assert_eq!(switch.of(), Some(DevicePlugin));
    switch.carried_out(&[]);
    switch.carried_out(&[]);
    switch.commit();
    assert_eq!(switch.of(), Some(Dra));
    assert!(switch.waiting().is_empty());
}

#[test]
fn claim_keeps_its_pool_until_released() {
    let mut switch = switch(record(Dra));
    switch.decide(DevicePlugin);
    switch.carried_out(&[]);
    switch.claims_read(claims(true));
    switch.commit();
    assert_eq!(switch.of(), Some(Dra), "it is allocated and not prepared");
    assert_eq!(switch.claim_in_the_way(), Some(&claim()));
    switch.released(&claim());
    assert_eq!((switch.of(), switch.claim_in_the_way()), (None, None));
    switch.carried_out(&[]);
    assert!(switch.awaits_claims(), "another may have been allocated");
    switch.claims_read(claims(false));
    switch.commit();
    assert_eq!(switch.of(), Some(DevicePlugin));
}

#[test]
fn a_withdrawn_decision_offers_as_before() {
    let mut switch = switch(record(Dra));
    switch.decide(DevicePlugin);
    switch.carried_out(&[]);
    assert_eq!(switch.of(), None);
    switch.decide(Dra);
    assert_eq!(switch.of(), Some(Dra));
}

#[test]
fn a_disabled_pool_needs_no_class() {
    let mut switch = switch(record(Dra));
    switch.disable(true);
    assert_eq!(
        (switch.of(), switch.needs_classes()),
        (None, BTreeMap::new())
    );
    switch.carried_out(&[]);
    switch.claims_read(claims(false));
    switch.commit();
    assert_eq!(
        (switch.of(), switch.waits()),
        (Some(DevicePlugin), String::new())
    );
    switch.disable(false);
    assert_eq!(switch.of(), None, "the kubelet still has it");
}

#[test]
fn pool_moves_to_dra_with_class() {
    let mut new = Switch::new(MechanismsRecord::default());
    new.name(true);
    new.decide(Dra);
    assert_eq!(
        (new.of(), new.waits()),
        (None, "a list of the DeviceClasses".to_owned())
    );
    assert_eq!(new.waiting(), [key()].into());
    assert_eq!(new.needs_classes(), [(resource(), key().driver)].into());
    new.classes(ready(false));
    assert_eq!(
        new.target(&key()),
        Some(DevicePlugin),
        "as in an older cluster"
    );

    let mut switch = Switch::new(record(DevicePlugin));
    switch.name(true);
    switch.decide(Dra);
    for classes in [Classes::Unread, ready(false)] {
        switch.classes(classes);
        assert_eq!(switch.of(), Some(DevicePlugin));
        assert_eq!(
            switch.waits(),
            "a DeviceClass of example.com/gpu, to be offered by dra"
        );
    }
    // A driver that is gone has a pool of the resource.
    let mut gone = record(Dra).pools.remove(0);
    gone.driver = "gone.example.com".parse().unwrap();
    let mut with_another = switch.proposal();
    with_another.pools.push(gone);
    switch.set_known(with_another);
    assert_eq!(switch.of(), Some(DevicePlugin));
    assert_eq!(switch.needs_classes(), [(resource(), key().driver)].into());
    switch.classes(ready(true));
    assert_eq!(switch.of(), None, "it is withdrawn");
    switch.carried_out(&[]);
    switch.commit();
    switch.classes(ready(false));
    assert_eq!(
        switch.of(),
        Some(Dra),
        "a class that is replaced withdraws nothing"
    );
    switch.inputs.pools.clear();
    switch.refresh();
    assert_eq!(switch.needs_classes(), BTreeMap::new());
}

#[test]
fn unnamed_pool_leaves_the_kubelet_first() {
    let mut switch = switch(record(DevicePlugin));
    let LocalPool { driver, pool } = key();
    let in_slices = |switch: &Switch| switch.mechanisms().of(&driver, &pool, false) == Some(Dra);
    switch.name(false);
    assert!(!in_slices(&switch));
    switch.carried_out(&[]);
    switch.commit();
    assert!(in_slices(&switch) && switch.proposal().pools.is_empty());
}

#[test]
fn unrecorded_pool_follows_its_use() {
    for (target, in_use) in [(Dra, DevicePlugin), (DevicePlugin, Dra)] {
        let mut switch = switch(MechanismsRecord::default());
        switch.decide(target);
        switch.carried_out(&[in_use]);
        switch.claims_read(claims(false));
        switch.commit();
        assert_eq!(switch.of(), Some(in_use));
    }
    // Slices do not offer the devices that the device manager gave.
    let mut switch = switch(record(Dra));
    switch.carried_out(&[DevicePlugin, Dra]);
    assert_eq!(switch.of(), None);
    switch.commit();
    assert_eq!(switch.of(), None);
    switch.carried_out(&[Dra]);
    assert_eq!(switch.of(), Some(Dra));
}

#[test]
fn records_of_gone_drivers_go_first() {
    let mut full = record(DevicePlugin);
    for index in 0..POOLS_MAX {
        let mut gone = full.pools[0].clone();
        gone.driver = format!("a{index}.example.com").parse().unwrap();
        full.pools.push(gone);
    }
    let next = switch(full).proposal();
    assert_eq!(next.pools.len(), POOLS_MAX);
    assert!(next.pools.contains(&record(DevicePlugin).pools[0]));
}

/// A node with one device, its cluster, and what is durable.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
struct World {
    is_named: bool,
    is_disabled: bool,
    has_class: bool,
    /// The bridge answers an Allocate of the device.
    is_listed: bool,
    /// The kubelet has seen it in the list.
    is_listed_at_kubelet: bool,
    /// An Allocate has passed the check of the list.
    is_allocating: bool,
    /// True if a durable claim of the device plugin has it.
    is_held: bool,
    /// Presence in the slices as derived last since the start.
    is_desired: Option<bool>,
    is_in_slices: bool,
    /// The scheduler has seen it in slices.
    is_seen: bool,
    is_allocated: bool,
    /// The claim was allocated from slices that are gone.
    is_late: bool,
    is_prepared: bool,
    reported: Reported,
    switch: Switch,
    disk: MechanismsRecord,
}

/// All events; some of them only where they are possible.
const EVENTS: [fn(&mut World); 24] = [
    |world| world.switch.decide(Dra),
    |world| world.switch.decide(DevicePlugin),
    |world| world.has_class = !world.has_class,
    |world| world.is_disabled = !world.is_disabled,
    World::rename,
    World::bridge,
    World::derive,
    World::write_slices,
    |world| world.is_listed_at_kubelet = world.is_listed,
    |world| world.is_seen = world.is_in_slices,
    World::begin_allocate,
    World::end_allocate,
    |world| world.is_allocating = false,
    |world| world.is_held = false,
    World::schedule,
    World::prepare,
    |world| world.is_prepared = false,
    |world| world.is_allocated &= world.is_prepared,
    |world| world.round(|world| world.is_allocated, true),
    |world| world.round(|world| world.is_allocated, false),
    World::release,
    World::crash,
    |world| {
        world.disk = world.switch.proposal();
        world.crash();
    },
    World::lose_record,
];

impl World {
    fn new() -> Self {
        Self {
            disk: MechanismsRecord::default(),
            switch: Switch::new(MechanismsRecord::default()),
            reported: Reported::default(),
            is_named: true,
            is_disabled: false,
            has_class: false,
            is_listed: false,
            is_listed_at_kubelet: false,
            is_allocating: false,
            is_held: false,
            is_desired: None,
            is_in_slices: false,
            is_seen: false,
            is_allocated: false,
            is_late: false,
            is_prepared: false,
        }
    }

    fn of(&self) -> Option<Mechanism> {
        let LocalPool { driver, pool } = key();
        self.switch.mechanisms().of(&driver, &pool, self.is_named)
    }

    /// Names the pool, or takes its name. Without a record only the name says that the kubelet may have its device.
    fn rename(&mut self) {
        if !self.is_held || !self.disk.pools.is_empty() {
            self.is_named = !self.is_named;
        }
    }

    fn lose_record(&mut self) {
        if !self.is_held || self.is_named {
            self.disk = MechanismsRecord::default();
            self.crash();
        }
    }

    /// A round of the bridge.
    fn bridge(&mut self) {
        let is_here = self.is_named && self.of() == Some(DevicePlugin);
        self.is_listed = is_here && !self.is_prepared;
        self.reported.lists = self.switch.mechanisms().generation;
        self.report_use();
    }

    fn report_use(&mut self) {
        let by_kubelet = (self.is_held || self.is_allocating).then_some(DevicePlugin);
        let by_claim = self.is_prepared.then_some(Dra);
        let in_use = by_kubelet.into_iter().chain(by_claim).collect();
        self.reported.in_use = [(key(), in_use)].into();
    }

    /// A round of the writer of slices.
    fn derive(&mut self) {
        self.is_desired = Some(self.of() == Some(Dra));
        self.reported.slices = self.switch.mechanisms().generation;
        self.report_slices();
    }

    fn write_slices(&mut self) {
        self.is_in_slices = self.is_desired.unwrap_or(self.is_in_slices);
        self.report_slices();
    }

    fn report_slices(&mut self) {
        if self.is_desired.is_some() {
            self.reported.published = self.is_in_slices.then(key).into_iter().collect();
        }
    }

    /// The kubelet calls the device plugin.
    fn begin_allocate(&mut self) {
        self.is_allocating |= self.is_listed_at_kubelet && self.is_listed && !self.is_held;
    }

    /// The table of exclusive devices refuses the later.
    fn end_allocate(&mut self) {
        self.is_held |= std::mem::take(&mut self.is_allocating) && !self.is_prepared;
    }

    fn schedule(&mut self) {
        if self.is_seen && !self.is_allocated {
            (self.is_allocated, self.is_late) = (true, !self.is_in_slices);
        }
    }

    fn prepare(&mut self) {
        self.is_prepared |= self.is_allocated && !self.is_held;
    }

    /// A round of the task. `is_written`: whether the record can be written.
    fn round(&mut self, is_allocated: fn(&Self) -> bool, is_written: bool) {
        self.switch.inputs.reported = self.reported.clone();
        self.switch.name(self.is_named);
        self.switch.disable(self.is_disabled);
        self.switch.classes(ready(self.has_class));
        if self.switch.awaits_claims() {
            self.switch.claims_read(claims(is_allocated(self)));
        }
        let next = self.switch.proposal();
        self.check_move(&next);
        if is_written {
            self.disk = next.clone();
            self.switch.set_known(next);
        }
    }

    /// A pool moves only while it is free.
    fn check_move(&self, next: &MechanismsRecord) {
        let after = next.pools.first().map(|pool| pool.mechanism);
        let is_at_kubelet = self.is_held || self.is_allocating;
        match (self.switch.known(&key()), after) {
            (before, after) if before == after => {}
            (before, Some(Dra)) => {
                assert!(!is_at_kubelet && !self.is_listed, "it is at the kubelet");
                let is_used = self.switch.is_used(&key(), Dra);
                assert!(before.is_none() || !is_used, "a claim has it");
            }
            (_, Some(DevicePlugin)) => {
                let is_allocated = self.is_allocated && !self.is_late;
                assert!(!is_allocated && !self.is_in_slices, "it is in slices");
            }
            (_, None) => {}
        }
    }

    fn release(&mut self) {
        if !self.is_allocated
            && let Some(claim) = self.switch.claim_in_the_way().cloned()
        {
            self.switch.released(&claim);
        }
    }

    fn crash(&mut self) {
        self.switch = Switch::new(self.disk.clone());
        self.reported = Reported::default();
        (self.is_listed, self.is_allocating, self.is_desired) = (false, false, None);
        // The kubelet sees the end of its list.
        self.is_listed_at_kubelet = false;
        self.report_use();
    }

    fn check(&self) {
        let is_to_be_written = self.is_desired == Some(true);
        assert!(
            !(self.is_listed && self.is_in_slices),
            "it is offered by both"
        );
        assert!(
            !(self.is_listed && is_to_be_written),
            "it is offered by both soon"
        );
        let is_at_kubelet = self.is_held || self.is_allocating;
        assert!(
            !(is_at_kubelet && is_to_be_written),
            "a pod's device is in slices"
        );
        let is_given = is_at_kubelet && self.is_allocated;
        assert!(!is_given || self.is_late, "it is given twice");
        assert!(
            !(self.is_held && self.is_prepared),
            "two containers have it"
        );
    }

    /// Nothing disturbs any more: the pool gets to a mechanism.
    fn check_end(&self, mechanism: Mechanism) {
        let mut world = self.clone();
        (world.is_named, world.has_class, world.is_disabled) = (true, true, false);
        world.switch.decide(mechanism);
        (world.is_allocated, world.is_prepared) = (false, false);
        (world.is_held, world.is_allocating) = (false, false);
        for _ in 0..8 {
            world.release();
            world.bridge();
            world.derive();
            world.write_slices();
            world.round(|_| false, true);
            world.check();
        }
        let is_dra = mechanism == Dra;
        assert_eq!(world.of(), Some(mechanism), "{}", world.switch.waits());
        assert_eq!((world.is_listed, world.is_in_slices), (!is_dra, is_dra));
    }

    /// Generations count by their order alone.
    fn number_generations(&mut self) {
        let (switch, reported) = (&mut self.switch, &mut self.reported);
        let mut generations: Vec<&mut u64> = vec![
            &mut switch.generation,
            &mut switch.inputs.reported.lists,
            &mut switch.inputs.reported.slices,
            &mut reported.lists,
            &mut reported.slices,
        ];
        generations.extend(switch.withdrawn.values_mut().map(|of| &mut of.since));
        let order: BTreeSet<_> = generations.iter().map(|generation| **generation).collect();
        for generation in generations {
            *generation = order.range(..*generation).count() as u64;
        }
    }
}

/// States that are reached: by all sequences of up to seven events.
const STATES_MAX: usize = 5_000;

/// One of so many states is led to its end.
const ENDS_STEP: usize = 20;

/// Prints the events that led to a failed check.
struct Sequence(Vec<usize>);

impl Drop for Sequence {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("after the events {:?}", self.0);
        }
    }
}

#[test]
fn no_sequence_gives_a_device_twice() {
    let mut seen = BTreeSet::from([World::new()]);
    let mut front = vec![(World::new(), Vec::new())];
    while !front.is_empty() && seen.len() < STATES_MAX {
        for (world, events) in std::mem::take(&mut front) {
            for (index, event) in EVENTS.iter().enumerate() {
                let sequence = Sequence([&events[..], &[index]].concat());
                let mut next = world.clone();
                event(&mut next);
                next.check();
                next.number_generations();
                if seen.insert(next.clone()) {
                    front.push((next, sequence.0.clone()));
                }
            }
        }
    }
    for world in seen.iter().step_by(ENDS_STEP) {
        world.check_end(Dra);
        world.check_end(DevicePlugin);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, ..ProptestConfig::default() })]
    #[test]
    fn random_sequence_gives_no_device_twice(
        events in prop::collection::vec(0..EVENTS.len(), 1..300),
    ) {
        let mut world = World::new();
        for event in events {
            EVENTS[event](&mut world);
            world.check();
        }
        world.check_end(Dra);
        world.check_end(DevicePlugin);
    }
}
