use proptest::prelude::*;

use super::*;

const GPUS: [&str; 3] = ["0", "1", "2"];

/// What the world does within this time: the kubelet handles a list, updates the Node object; the scheduler sees slices.
const LIST_LAG: Duration = Duration::from_secs(4);
const NODE_LAG: Duration = Duration::from_secs(10);
const SCHEDULER_LAG: Duration = Duration::from_secs(20);

fn resource() -> ExtendedResource {
    "example.com/gpu".parse().unwrap()
}

fn key() -> LocalPool {
    LocalPool {
        driver: "gpu.example.com".parse().unwrap(),
        pool: "gpus".parse().unwrap(),
    }
}

fn device(name: &str) -> DeviceName {
    name.parse().unwrap()
}

fn decision(mechanism: Mechanism) -> Decision {
    Decision {
        mechanism,
        reason: "of the test".to_owned(),
    }
}

/// A switch for which classes do not matter.
fn new_switch(record: Record, is_new_node: bool, now: Instant) -> Switch {
    let mut switch = Switch::new(record, is_new_node, now);
    switch.set_classes(Classes::NotNeeded, now);
    switch
}

fn ready(is_ready: bool) -> Classes {
    Classes::Ready([resource()].into_iter().filter(|_| is_ready).collect())
}

fn record(mechanism: Mechanism) -> Record {
    let pool = PoolRecord {
        resource: resource(),
        mechanism,
        claimed: BTreeSet::new(),
    };
    Record {
        decided: Some(mechanism),
        pools: [(key(), pool)].into(),
    }
}

fn named() -> BTreeMap<LocalPool, Option<ExtendedResource>> {
    [(key(), Some(resource()))].into()
}

fn mechanism(switch: &Switch) -> Option<Mechanism> {
    switch.mechanisms().of(&key().driver, &key().pool, true)
}

fn at(generation: u64) -> Acknowledged {
    Acknowledged {
        kubelet: generation,
        slices: generation,
    }
}

#[test]
fn a_pool_without_a_record_is_offered_by_neither_until_both_were_read() {
    let now = Instant::now();
    let mut switch = new_switch(Record::default(), true, now);
    switch.set_pools(named(), now);
    assert_eq!(
        (mechanism(&switch), switch.needs(now)),
        (None, Needs::default()),
        "nothing is decided"
    );
    switch.decide(decision(Mechanism::DevicePlugin), now);
    assert_eq!(
        switch.needs(now),
        Needs::default(),
        "slices are not withdrawn yet"
    );
    switch.acknowledge(at(switch.mechanisms().generation), &BTreeSet::new(), now);
    assert_eq!(
        switch.needs(now),
        Needs {
            slices: true,
            ..Needs::default()
        }
    );
    switch.saw_slices(&BTreeSet::new(), now);
    assert!(
        switch.needs(now).claims,
        "it was in no slice, so no time has to pass"
    );
    let claimed: BTreeMap<_, _> = [(key(), BTreeSet::from([device("1")]))].into();
    let next = switch.saw_claims(&claimed, now).unwrap();
    assert_eq!(mechanism(&switch), None, "it is not durable");
    switch.committed(next, now);
    assert_eq!(mechanism(&switch), Some(Mechanism::DevicePlugin));
    let LocalPool { driver, pool } = key();
    assert!(switch.mechanisms().is_claimed(&driver, &pool, &device("1")));
    assert!(
        switch.needs(now).claims && !switch.mechanisms().is_claimed(&driver, &pool, &device("0"))
    );
    let next = switch.saw_claims(&BTreeMap::new(), now).unwrap();
    switch.committed(next, now);
    assert!(!switch.mechanisms().is_claimed(&driver, &pool, &device("1")));
    assert_eq!(switch.needs(now), Needs::default());
}

#[test]
fn dra_waits_for_the_node_object_and_goes_on_after_a_restart() {
    let now = Instant::now();
    let mut switch = new_switch(record(Mechanism::DevicePlugin), false, now);
    switch.set_pools(named(), now);
    assert_eq!(
        mechanism(&switch),
        Some(Mechanism::DevicePlugin),
        "as it was before the restart"
    );
    let before = switch.mechanisms().generation;
    switch.decide(decision(Mechanism::Dra), now);
    let generation = switch.mechanisms().generation;
    assert!(mechanism(&switch).is_none() && generation > before);
    switch.acknowledge(at(before), &BTreeSet::new(), now);
    assert_eq!(
        switch.needs(now + NODE_SETTLE),
        Needs::default(),
        "an older withdrawal does not count"
    );
    switch.acknowledge(at(generation), &BTreeSet::new(), now);
    assert!(!switch.needs(now).node && switch.needs(now + NODE_SETTLE).node);
    let none = BTreeMap::new();
    assert_eq!(
        switch.saw_node(&none, now),
        None,
        "the read began too early"
    );
    let later = now + NODE_SETTLE;
    assert_eq!(switch.saw_node(&[(resource(), 3)].into(), later), None);
    let status = switch
        .mechanisms()
        .of_resource(&key().driver, &resource())
        .next()
        .cloned()
        .unwrap();
    assert!(
        status.waits_for.contains("still has 3 example.com/gpu"),
        "{status:?}"
    );
    assert!(switch.overdue(later).is_empty());
    assert!(switch.overdue(now + WITHHELD_LONG)[&key()].contains("example.com/gpu"));
    let next = switch.saw_node(&none, later).unwrap();
    let restarted = new_switch(next, false, later);
    assert_eq!(
        mechanism(&restarted),
        Some(Mechanism::Dra),
        "before anything was read"
    );
}

#[test]
fn a_decision_that_is_taken_back_offers_the_pool_as_before() {
    let now = Instant::now();
    let mut switch = new_switch(record(Mechanism::Dra), false, now);
    switch.set_pools(named(), now);
    switch.decide(decision(Mechanism::DevicePlugin), now);
    assert_eq!(mechanism(&switch), None);
    switch.acknowledge(at(switch.mechanisms().generation), &BTreeSet::new(), now);
    switch.saw_slices(&[key()].into(), now);
    switch.saw_slices(&BTreeSet::new(), now);
    assert!(
        !switch.needs(now).claims && switch.needs(now + SLICES_SETTLE).claims,
        "a scheduler may be late"
    );
    switch.decide(decision(Mechanism::Dra), now);
    assert_eq!(mechanism(&switch), Some(Mechanism::Dra));
}

#[test]
fn a_pool_that_an_operator_disables_goes_to_the_device_plugin_and_back() {
    let now = Instant::now();
    let mut switch = new_switch(record(Mechanism::Dra), false, now);
    assert_eq!(mechanism(&switch), Some(Mechanism::Dra));
    switch.set_disabled([key()].into(), now);
    assert_eq!(mechanism(&switch), None, "its slices are still there");
    assert!(switch.needs_classes().is_empty());
    let done = at(switch.mechanisms().generation);
    switch.acknowledge(done, &BTreeSet::new(), now);
    switch.saw_slices(&BTreeSet::new(), now);
    let later = now + SLICES_SETTLE;
    let next = switch.saw_claims(&BTreeMap::new(), later).unwrap();
    switch.committed(next, later);
    assert_eq!(mechanism(&switch), Some(Mechanism::DevicePlugin));
    switch.set_disabled(BTreeSet::new(), later);
    assert_eq!(mechanism(&switch), None, "the kubelet still has it");
}

#[test]
fn a_pool_that_loses_its_name_is_withdrawn_from_the_kubelet_before_it_is_in_slices() {
    let now = Instant::now();
    let mut switch = new_switch(record(Mechanism::DevicePlugin), false, now);
    let LocalPool { driver, pool } = key();
    let in_slices =
        |switch: &Switch| switch.mechanisms().of(&driver, &pool, false) == Some(Mechanism::Dra);
    switch.set_pools([(key(), None)].into(), now);
    assert!(!in_slices(&switch));
    switch.acknowledge(at(switch.mechanisms().generation), &BTreeSet::new(), now);
    let next = switch
        .saw_node(&BTreeMap::new(), now + NODE_SETTLE)
        .unwrap();
    assert!(next.pools.is_empty());
    switch.committed(next, now);
    assert!(in_slices(&switch));
}

#[test]
fn records_are_bounded_and_those_of_present_drivers_stay() {
    let now = Instant::now();
    let mut full = record(Mechanism::DevicePlugin);
    let known = full.pools[&key()].clone();
    for index in 0..POOLS_MAX {
        let gone = LocalPool {
            driver: format!("a{index}.example.com").parse().unwrap(),
            ..key()
        };
        full.pools.insert(gone, known.clone());
    }
    let mut switch = new_switch(full, false, now);
    switch.set_pools(named(), now);
    switch.decide(decision(Mechanism::Dra), now);
    switch.acknowledge(at(switch.mechanisms().generation), &BTreeSet::new(), now);
    let next = switch
        .saw_node(&BTreeMap::new(), now + NODE_SETTLE)
        .unwrap();
    assert!(next.pools.len() == POOLS_MAX && next.pools.contains_key(&key()));
}

#[test]
fn a_pool_stays_with_the_device_plugin_until_its_class_is_there_and_then_without_it() {
    let now = Instant::now();
    // A new node offers nothing before the classes were read, and then what an older cluster does.
    let mut new = Switch::new(Record::default(), true, now);
    new.set_pools(named(), now);
    new.decide(decision(Mechanism::Dra), now);
    let status = |switch: &Switch| switch.mechanisms().pools[&key()].clone();
    assert_eq!(
        (mechanism(&new), status(&new).waits_for.as_str()),
        (None, "a list of the DeviceClasses")
    );
    assert!(new.overdue(now).is_empty() && new.overdue(now + WITHHELD_LONG).contains_key(&key()));
    assert_eq!(new.needs_classes(), [(resource(), key().driver)].into());
    new.set_classes(ready(false), now);
    assert_eq!(new.target(&key()), Some(Mechanism::DevicePlugin));

    let mut switch = Switch::new(record(Mechanism::DevicePlugin), false, now);
    switch.set_pools(named(), now);
    for classes in [Classes::Unread, ready(false)] {
        switch.decide(decision(Mechanism::Dra), now);
        switch.set_classes(classes, now);
        assert_eq!(mechanism(&switch), Some(Mechanism::DevicePlugin));
        assert!(
            status(&switch)
                .waits_for
                .contains("a DeviceClass of example.com/gpu")
        );
    }
    switch.set_classes(ready(true), now);
    assert_eq!(mechanism(&switch), None, "it is withdrawn");
    switch.set_classes(ready(false), now);
    assert_eq!(
        mechanism(&switch),
        Some(Mechanism::DevicePlugin),
        "nothing was committed"
    );

    let mut switch = Switch::new(
        Record {
            decided: Some(Mechanism::Dra),
            ..record(Mechanism::Dra)
        },
        false,
        now,
    );
    switch.set_pools(named(), now);
    switch.set_classes(ready(false), now);
    assert_eq!(
        mechanism(&switch),
        Some(Mechanism::Dra),
        "a class that is replaced withdraws nothing"
    );
    // A driver that is gone needs no class.
    switch.set_pools(BTreeMap::new(), now);
    assert_eq!(switch.needs_classes(), BTreeMap::new());
}

/// A node, its cluster, and what is durable.
struct World {
    now: Instant,
    disk: Record,
    switch: Switch,
    done: Acknowledged,
    had_slices: bool,
    is_named: bool,
    /// An operator keeps the pool with the device plugin.
    is_disabled: bool,
    has_class: bool,
    /// The device plugin's list: whether each device is healthy.
    list: BTreeMap<&'static str, bool>,
    list_since: Instant,
    /// Devices in durable claims of the device plugin.
    held: BTreeSet<&'static str>,
    /// As slices know them.
    reported: BTreeSet<&'static str>,
    kubelet_list: BTreeMap<&'static str, bool>,
    kubelet_since: Instant,
    kubelet_allocated: BTreeSet<&'static str>,
    node_allocatable: u64,
    desired: Option<BTreeSet<&'static str>>,
    slices: BTreeSet<&'static str>,
    slices_since: Instant,
    scheduler: BTreeSet<&'static str>,
    allocated: BTreeSet<&'static str>,
    prepared: BTreeSet<&'static str>,
}

impl World {
    fn new() -> Self {
        let now = Instant::now();
        Self {
            now,
            disk: Record::default(),
            switch: Switch::new(Record::default(), true, now),
            done: Acknowledged::default(),
            had_slices: false,
            is_named: true,
            is_disabled: false,
            has_class: false,
            list: BTreeMap::new(),
            list_since: now,
            held: BTreeSet::new(),
            reported: BTreeSet::new(),
            kubelet_list: BTreeMap::new(),
            kubelet_since: now,
            kubelet_allocated: BTreeSet::new(),
            node_allocatable: 0,
            desired: None,
            slices: BTreeSet::new(),
            slices_since: now,
            scheduler: BTreeSet::new(),
            allocated: BTreeSet::new(),
            prepared: BTreeSet::new(),
        }
    }

    fn of(&self) -> Option<Mechanism> {
        self.switch
            .mechanisms()
            .of(&key().driver, &key().pool, self.is_named)
    }

    /// A round of the bridge.
    fn bridge(&mut self) {
        let mechanisms = self.switch.mechanisms();
        let LocalPool { driver, pool } = key();
        let is_here =
            self.is_named && mechanisms.of(&driver, &pool, true) == Some(Mechanism::DevicePlugin);
        let entry = |gpu: &&'static str| {
            let is_claimed = mechanisms.is_claimed(&driver, &pool, &device(gpu));
            let is_free = !is_claimed && !self.prepared.contains(gpu);
            match is_here {
                true => Some((*gpu, is_free)),
                false => self.held.contains(gpu).then_some((*gpu, false)),
            }
        };
        let list = GPUS.iter().filter_map(entry).collect();
        if std::mem::replace(&mut self.list, list) != self.list {
            self.list_since = self.now;
        }
        self.reported = self.held.clone();
        self.done.kubelet = mechanisms.generation;
    }

    fn derive(&mut self) {
        let is_here = self.of() == Some(Mechanism::Dra);
        let devices = GPUS
            .iter()
            .filter(|gpu| is_here && !self.reported.contains(*gpu))
            .copied();
        self.desired = Some(devices.collect());
        self.had_slices |= !self.slices.is_empty();
        self.done.slices = self.switch.mechanisms().generation;
    }

    fn write_slices(&mut self) {
        if let Some(desired) = &self.desired
            && self.slices != *desired
        {
            self.slices.clone_from(desired);
            self.slices_since = self.now;
        }
    }

    fn tick(&mut self, seconds: u64) {
        self.now += Duration::from_secs(seconds);
        if self.now >= self.list_since + LIST_LAG {
            self.kubelet_lists(self.list_since + LIST_LAG);
        }
        if self.now >= self.kubelet_since + NODE_LAG {
            self.update_node();
        }
        if self.now >= self.slices_since + SCHEDULER_LAG {
            self.scheduler.clone_from(&self.slices);
        }
    }

    fn kubelet_lists(&mut self, at: Instant) {
        if self.kubelet_list != self.list {
            (self.kubelet_list, self.kubelet_since) = (self.list.clone(), at);
        }
    }

    fn update_node(&mut self) {
        self.node_allocatable = self
            .kubelet_list
            .values()
            .filter(|healthy| **healthy)
            .count() as u64;
    }

    /// A round of the task; `is_written`: whether the record can be written.
    fn round(&mut self, is_written: bool) {
        let disabled = self.is_disabled.then(key).into_iter().collect();
        self.switch.set_disabled(disabled, self.now);
        let pool = self.is_named.then(resource);
        self.switch.set_pools([(key(), pool)].into(), self.now);
        let had_slices = [key()].into_iter().filter(|_| self.had_slices).collect();
        self.switch.acknowledge(self.done, &had_slices, self.now);
        let (needs, now) = (self.switch.needs(self.now), self.now);
        if needs.node {
            let next = self
                .switch
                .saw_node(&[(resource(), self.node_allocatable)].into(), now);
            self.commit(next, is_written);
        }
        if needs.slices {
            let published = [key()].into_iter().filter(|_| !self.slices.is_empty());
            self.switch.saw_slices(&published.collect(), now);
        }
        if self.switch.needs(now).claims {
            let allocated = self.allocated.iter().map(|gpu| device(gpu)).collect();
            let next = self.switch.saw_claims(&[(key(), allocated)].into(), now);
            self.commit(next, is_written);
        }
        if is_written {
            self.disk = self.switch.record().clone();
        }
    }

    fn commit(&mut self, next: Option<Record>, is_written: bool) {
        let Some(next) = next.filter(|_| is_written) else {
            return;
        };
        self.disk = next.clone();
        self.switch.committed(next, self.now);
    }

    fn crash(&mut self) {
        self.switch = Switch::new(self.disk.clone(), false, self.now);
        self.has_class = false;
        (self.done, self.had_slices) = Default::default();
        (self.list, self.list_since) = (BTreeMap::new(), self.now);
        self.reported = self.held.clone();
        self.desired = None;
        // The kubelet sees the end of its list.
        self.kubelet_list
            .values_mut()
            .for_each(|healthy| *healthy = false);
        self.kubelet_since = self.now;
    }

    fn is_free_at_kubelet(&self, gpu: &str) -> bool {
        self.kubelet_list.get(gpu) == Some(&true) && !self.kubelet_allocated.contains(gpu)
    }

    /// The kubelet allocates a device, and calls the device plugin.
    fn allocate(&mut self, gpu: &'static str) {
        if !self.is_free_at_kubelet(gpu) {
            return;
        }
        // The kubelet has the device for as long as the call takes.
        if self.list.contains_key(gpu) {
            assert!(!self.allocated.contains(gpu), "a claim has device {gpu}");
            self.held.insert(gpu);
            self.kubelet_allocated.insert(gpu);
        }
    }

    fn schedule(&mut self, gpu: &'static str) {
        if self.scheduler.contains(gpu) && !self.allocated.contains(gpu) {
            assert!(
                !self.held.contains(gpu),
                "the device manager has device {gpu}"
            );
            self.allocated.insert(gpu);
        }
    }

    fn happens(&mut self, event: u8, gpu: &'static str, flag: bool, seconds: u64) {
        match event {
            0 => {
                let mechanism = if flag {
                    Mechanism::Dra
                } else {
                    Mechanism::DevicePlugin
                };
                self.switch.decide(decision(mechanism), self.now);
            }
            1 | 2 => self.bridge(),
            3 | 4 => self.derive(),
            5 => self.write_slices(),
            6 => self.kubelet_lists(self.now),
            7 => self.update_node(),
            8..=11 => self.round(flag || seconds > 5),
            12 | 13 => self.allocate(gpu),
            14 => drop(self.kubelet_allocated.remove(gpu)),
            15 => self.held.retain(|gpu| self.kubelet_allocated.contains(gpu)),
            16 => self.scheduler.clone_from(&self.slices),
            17 | 18 => self.schedule(gpu),
            19 if self.allocated.contains(gpu) => drop(self.prepared.insert(gpu)),
            20 => drop((self.prepared.remove(gpu), self.allocated.remove(gpu))),
            21 => self.crash(),
            22 => {
                // The kubelet restarts, and the device plugin registers again.
                (self.kubelet_list, self.kubelet_since) = (BTreeMap::new(), self.now);
                self.list_since = self.now;
            }
            23 if seconds == 0 => self.is_named = !self.is_named,
            24 => {
                self.has_class = flag;
                self.switch.set_classes(ready(flag), self.now);
            }
            25 => self.is_disabled = flag,
            _ => self.tick(seconds),
        }
    }

    fn check(&self) {
        for gpu in GPUS {
            let (published, is_free) = (
                self.slices.contains(gpu) || self.scheduler.contains(gpu),
                self.is_free_at_kubelet(gpu),
            );
            let is_free_in_slices = published && !self.allocated.contains(gpu);
            assert!(
                !(is_free && is_free_in_slices),
                "device {gpu} is free in both"
            );
            assert!(
                !(is_free && self.allocated.contains(gpu)),
                "device {gpu} of a claim is free at the kubelet"
            );
            assert!(
                !(is_free_in_slices && self.held.contains(gpu)),
                "device {gpu} of a pod is free in slices"
            );
        }
    }

    /// Nothing disturbs any more.
    fn settle(&mut self, mechanism: Mechanism) {
        (self.is_named, self.has_class, self.is_disabled) = (true, true, false);
        self.switch.decide(decision(mechanism), self.now);
        self.switch.set_classes(ready(true), self.now);
        (self.allocated, self.prepared) = Default::default();
        (self.kubelet_allocated, self.held) = Default::default();
        for _ in 0..40 {
            self.round(true);
            self.bridge();
            self.derive();
            self.write_slices();
            self.check();
            self.tick(5);
            self.check();
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1000, ..ProptestConfig::default() })]
    /// Restarts of daemon and kubelet, records that cannot be written, changed decisions and names, and pods of both kinds, in any order.
    #[test]
    fn no_device_is_free_in_both_or_handed_to_two_and_the_switch_ends(
        events in prop::collection::vec((0u8..32, 0usize..GPUS.len(), any::<bool>(), 0u64..20), 1..250),
        ends_in_dra in any::<bool>(),
    ) {
        let mut world = World::new();
        for (event, gpu, flag, seconds) in events {
            world.happens(event, GPUS[gpu], flag, seconds);
            world.check();
        }
        let mechanism = if ends_in_dra { Mechanism::Dra } else { Mechanism::DevicePlugin };
        world.settle(mechanism);
        prop_assert_eq!(world.of(), Some(mechanism));
        let all = GPUS.len();
        let (at_kubelet, in_slices) = (world.node_allocatable as usize, world.slices.len());
        prop_assert_eq!((at_kubelet, in_slices), if ends_in_dra { (0, all) } else { (all, 0) });
    }
}
