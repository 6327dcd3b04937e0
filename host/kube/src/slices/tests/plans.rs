//! Plans, carried out to their end or not.

use std::collections::BTreeSet;

use proptest::prelude::*;

use super::super::content::{Content, of_pool};
use super::super::planner::{Counters, Plan, Step, Stood, Times, Wish, plan, stood};
use super::server::Store;
use super::*;
use nodedock_model::{CounterSet, limit};

struct Bench {
    store: Store,
    pool: Pool,
    times: Times,
    stood: Stood,
    counters: Counters,
    /// Somebody else wrote since the pool was as it is to be.
    is_meddled: bool,
}

impl Bench {
    fn new(pool: Pool) -> Self {
        let (times, stood) = (Times::default(), Stood::new());
        Self { store: Store::new(), pool, times, stood, counters: Counters::Apart, is_meddled: false }
    }

    fn wanted(&self) -> Content {
        of_pool(&self.pool, &BTreeSet::new(), TaintEffect::NoSchedule)
    }

    fn plan(&mut self) -> Plan {
        let (content, owner, key) = (self.wanted(), owner(), key("gpu.example.com", "p"));
        let held: Vec<_> = self.store.held().collect();
        self.times.learn(held.iter(), &content);
        let (counters, stood, times) = (self.counters, &self.stood, &self.times);
        let wish =
            Wish { key: &key, owner: &owner, content: &content, counters, generation: 0, stood, times };
        plan(&wish, held.iter()).unwrap()
    }

    /// Plans and carries it out; how many writes it took.
    fn settle(&mut self) -> usize {
        let plan = self.plan();
        plan.steps.iter().for_each(|step| self.store.carry_out(step).unwrap());
        let (key, wanted) = (key("gpu.example.com", "p"), self.wanted());
        assert_eq!(visible(&self.store, &key), Some(wanted));
        let held: Vec<_> = self.store.held().collect();
        assert_eq!(held.len(), plan.slices);
        assert!(held.iter().all(|held| held.generation == plan.generation), "{held:?}");
        assert_eq!(self.plan().steps, [], "nothing is left to be done");
        self.times.learn(held.iter(), &self.wanted());
        (self.stood, self.is_meddled) = (stood(held.iter()), false);
        plan.steps.len()
    }

    fn generation(&self) -> i64 {
        self.store.held().map(|held| held.generation).max().unwrap_or(0)
    }

    fn device(&mut self, index: usize) -> &mut Device {
        self.pool.devices.get_mut(&device_name(index)).unwrap()
    }
}

#[test]
fn a_device_that_changes_changes_one_slice_and_no_generation() {
    let mut bench = Bench::new(devices(1000));
    assert_eq!((bench.settle(), bench.generation()), (8, 1));
    bench.device(700).allow_multiple_allocations = true;
    assert_eq!((bench.settle(), bench.generation()), (1, 1));
    bench.pool.devices.remove(&device_name(5));
    assert_eq!((bench.settle(), bench.generation()), (1, 1));
    // It takes the place of the one that left.
    bench.pool.devices.insert(device_name(5000), Device::default());
    assert_eq!((bench.settle(), bench.generation()), (1, 1));
}

#[test]
fn slices_that_come_or_go_and_two_that_change_begin_a_generation() {
    let mut bench = Bench::new(devices(128));
    assert_eq!((bench.settle(), bench.generation()), (1, 1));
    bench.pool = devices(129);
    assert_eq!((bench.settle(), bench.generation()), (2, 2));
    bench.device(0).allow_multiple_allocations = true;
    bench.device(128).allow_multiple_allocations = true;
    assert_eq!((bench.settle(), bench.generation()), (2, 3));
    bench.pool = devices(128);
    assert_eq!((bench.settle(), bench.generation()), (2, 4));
    bench.pool = devices(0);
    assert_eq!(bench.settle(), 1);
}

#[test]
fn a_slice_that_somebody_deletes_is_made_again_alone() {
    let mut bench = Bench::new(devices(300));
    bench.settle();
    let name = bench.store.held().nth(1).unwrap().name;
    bench.store.remove(&name);
    assert_eq!((bench.settle(), bench.generation()), (1, 1));
    let names: Vec<String> = bench.store.held().map(|held| held.name[..5].to_owned()).collect();
    assert_eq!(names, ["00000", "00001", "00002"]);
}

#[test]
fn counters_stand_in_a_slice_of_their_own_and_before_1_35_with_their_devices() {
    let set = |name: &str, counter: &str, value: &str| CounterSet {
        name: name.to_owned(),
        counters: [(counter.to_owned(), value.to_owned())].into(),
    };
    let mut pool = devices(70);
    pool.shared_counters = vec![set("memory", "bytes", "80Gi")];
    pool.devices.values_mut().for_each(|device| device.consumes = vec![set("memory", "bytes", "10Gi")]);
    let mut bench = Bench::new(pool);
    assert_eq!(bench.settle(), 3);
    bench.pool.shared_counters = vec![set("memory", "bytes", "81920Mi")];
    assert_eq!(bench.settle(), 0, "it is the same amount");
    bench.pool.shared_counters = vec![set("memory", "bytes", "96Gi")];
    assert_eq!(bench.settle(), 1);

    let (key, owner, times) = (key("gpu.example.com", "p"), owner(), Times::default());
    let together = |content: &Content| {
        let counters = Counters::Together;
        let stood = &Stood::new();
        let wish = Wish { key: &key, owner: &owner, content, counters, generation: 0, stood, times: &times };
        plan(&wish, [].into_iter())
    };
    let wide = bench.wanted();
    assert!(together(&wide).unwrap_err().to_string().contains("70 devices"));
    bench.pool.devices.retain(|name, _| *name < device_name(64));
    let planned = together(&bench.wanted()).unwrap();
    let [Step::Create { draft, .. }] = planned.steps.as_slice() else { panic!("{planned:?}") };
    assert_eq!((draft.devices.len(), draft.counters.len()), (64, 1));
}

#[test]
fn taints_keep_the_time_at_which_they_were_added() {
    let times = |bench: &Bench| -> Vec<String> {
        let held: Vec<_> = bench.store.held().collect();
        let devices = held.iter().flat_map(|held| held.content.devices.values());
        devices.flat_map(|device| device.taints().filter_map(|(_, time)| time.map(str::to_owned))).collect()
    };
    let mut bench = Bench::new(devices(2));
    bench.device(0).taints = vec![taint("a")];
    bench.settle();
    let first = times(&bench);
    assert_eq!(first.len(), 1);
    bench.device(0).allow_multiple_allocations = true;
    assert_eq!((bench.settle(), times(&bench)), (1, first.clone()), "another change");
    let name = bench.store.held().next().unwrap().name;
    bench.store.remove(&name);
    assert_eq!((bench.settle(), times(&bench)), (1, first.clone()), "a kubelet's wipe");
    bench.device(0).taints = vec![taint("b")];
    bench.settle();
    assert_ne!(times(&bench), first, "it is another taint");
    bench.device(0).taints = Vec::new();
    bench.settle();
    bench.device(0).taints = vec![taint("a")];
    bench.settle();
    assert_ne!(times(&bench), first, "it is another time");
}

#[test]
fn a_slice_whose_deletion_waits_for_somebody_is_replaced() {
    let mut bench = Bench::new(devices(200));
    bench.settle();
    let name = bench.store.held().next().unwrap().name;
    bench.store.edit(&name, |object| object["metadata"]["deletionTimestamp"] = "now".into());
    let planned = bench.plan();
    planned.steps.iter().for_each(|step| bench.store.carry_out(step).unwrap());
    assert_eq!((planned.generation, planned.slices, planned.steps.len()), (2, 2, 2));
    assert_eq!(visible(&bench.store, &key("gpu.example.com", "p")), Some(bench.wanted()));
    assert_eq!(bench.plan().steps, []);
    bench.store.remove(&name);
    assert_eq!(bench.settle(), 0);
}

#[test]
fn the_last_generation_is_followed_by_the_first() {
    let mut bench = Bench::new(devices(200));
    bench.settle();
    let names: Vec<String> = bench.store.held().map(|held| held.name).collect();
    for name in names {
        bench.store.edit(&name, |object| object["spec"]["pool"]["generation"] = i64::MAX.into());
    }
    assert_eq!(bench.settle(), 0, "what a server has is taken");
    bench.pool = devices(300);
    bench.settle();
    assert_eq!(bench.generation(), 1);
}

#[test]
fn names_are_short_enough_and_tell_the_place() {
    let mut bench = Bench::new(devices(1));
    bench.settle();
    let name = bench.store.held().next().unwrap().name;
    assert!(name.starts_with("00000-gpu.example.com-node-1-"), "{name}");

    let (content, times) = (bench.wanted(), Times::default());
    for node in ["n".repeat(253), format!("{}.b", "n".repeat(35)), "n".repeat(36) + "-x"] {
        let owner = Owner { name: node, ..owner() };
        let key = key("gpu.example.com", "p");
        let (counters, stood, times) = (Counters::Apart, &Stood::new(), &times);
        let wish =
            Wish { key: &key, owner: &owner, content: &content, counters, generation: 0, stood, times };
        let planned = plan(&wish, [].into_iter()).unwrap();
        let [Step::Create { generate_name, .. }] = planned.steps.as_slice() else { panic!("{planned:?}") };
        assert!(generate_name.len() <= limit::SLICE_PREFIX_BYTES_MAX, "{generate_name}");
        assert!(nodedock_model::ObjectName::new(format!("{generate_name}abcde")).is_ok(), "{generate_name}");
    }
}

#[test]
fn slices_of_another_making_are_taken_over() {
    let mut bench = Bench::new(devices(200));
    bench.settle();
    let mut names: Vec<String> = bench.store.held().map(|held| held.name).collect();
    let object = bench.store.objects().next().unwrap().clone();
    // The same devices twice, once under a name that tells no place.
    bench.store.edit(&names.remove(0), |known| {
        *known = object;
        known["metadata"]["name"] = "random-name".into();
        known["metadata"]["uid"] = "uid-of-its-own".into();
    });
    assert_eq!(bench.store.held().count(), 3);
    assert_eq!((bench.settle(), bench.generation()), (1, 1), "one is deleted");
}

#[derive(Debug, Clone)]
enum Act {
    Add(usize, usize),
    Remove(usize, usize),
    Change(usize),
    Taint(usize),
    Counters(bool),
    /// Carries out so many steps of what is planned, and no more.
    Crash(usize),
    Settle,
    Deleted(usize),
    /// Somebody takes the first device out of a slice.
    Emptied(usize),
    Generation(usize, i64),
    Count(usize),
    Copied(usize),
}

fn acts() -> impl Strategy<Value = Vec<Act>> {
    let act = prop_oneof![
        (0..300usize, 1..150usize).prop_map(|(at, count)| Act::Add(at, count)),
        (0..300usize, 1..150usize).prop_map(|(at, count)| Act::Remove(at, count)),
        (0..300usize).prop_map(Act::Change),
        (0..300usize).prop_map(Act::Taint),
        any::<bool>().prop_map(Act::Counters),
        (0..4usize).prop_map(Act::Crash),
        Just(Act::Settle),
        (0..4usize).prop_map(Act::Deleted),
        (0..4usize).prop_map(Act::Emptied),
        (0..4usize, 0..5i64).prop_map(|(at, generation)| Act::Generation(at, generation)),
        (0..4usize).prop_map(Act::Count),
        (0..4usize).prop_map(Act::Copied),
    ];
    prop::collection::vec(act, 1..16)
}

impl Bench {
    fn act(&mut self, act: &Act) {
        let nth = |store: &Store, at: usize| {
            let names: Vec<String> = store.held().map(|held| held.name).collect();
            names.get(at % names.len().max(1)).cloned()
        };
        self.is_meddled |= matches!(
            act,
            Act::Deleted(_) | Act::Emptied(_) | Act::Generation(..) | Act::Count(_) | Act::Copied(_)
        );
        match act {
            Act::Add(at, count) => {
                let added = (*at..at + count).map(|index| (device_name(index), Device::default()));
                let known = std::mem::take(&mut self.pool.devices);
                self.pool.devices = added.collect();
                self.pool.devices.extend(known);
            }
            Act::Remove(at, count) => {
                (*at..at + count).for_each(|index| drop(self.pool.devices.remove(&device_name(index))));
            }
            Act::Change(index) => {
                if let Some(device) = self.pool.devices.get_mut(&device_name(*index)) {
                    device.allow_multiple_allocations = !device.allow_multiple_allocations;
                }
            }
            Act::Taint(index) => {
                if let Some(device) = self.pool.devices.get_mut(&device_name(*index)) {
                    device.taints = if device.taints.is_empty() { vec![taint("a")] } else { Vec::new() };
                }
            }
            Act::Counters(on) => {
                let counters = [("c".to_owned(), "1".to_owned())].into();
                let set = CounterSet { name: "s".to_owned(), counters };
                self.pool.shared_counters = if *on { vec![set] } else { Vec::new() };
            }
            Act::Crash(steps) => self.carry_out(*steps),
            Act::Settle => drop(self.settle()),
            Act::Deleted(at) => {
                if let Some(name) = nth(&self.store, *at) {
                    self.store.remove(&name);
                }
            }
            Act::Emptied(at) => {
                if let Some(name) = nth(&self.store, *at) {
                    self.store.edit(&name, |object| {
                        object["spec"]["devices"].as_array_mut().map(|devices| devices.remove(0));
                    });
                }
            }
            Act::Generation(at, generation) => {
                if let Some(name) = nth(&self.store, *at) {
                    self.store
                        .edit(&name, |object| object["spec"]["pool"]["generation"] = (*generation).into());
                }
            }
            Act::Count(at) => {
                if let Some(name) = nth(&self.store, *at) {
                    self.store.edit(&name, |object| object["spec"]["pool"]["resourceSliceCount"] = 2.into());
                }
            }
            Act::Copied(at) => {
                if let Some(name) = nth(&self.store, *at) {
                    let copy = format!("copy-of-{name}");
                    let copy = copy[..copy.len().min(200)].to_owned();
                    self.store.edit(&name, |object| {
                        object["metadata"]["name"] = copy.clone().into();
                        object["metadata"]["uid"] = copy.into();
                    });
                }
            }
        }
    }

    /// At each step a reader sees what was there before, what is to be, or that the pool is not complete.
    fn carry_out(&mut self, steps: usize) {
        let (key, wanted) = (key("gpu.example.com", "p"), self.wanted());
        let before = visible(&self.store, &key);
        for step in self.plan().steps.into_iter().take(steps) {
            self.store.carry_out(&step).unwrap();
            let now = visible(&self.store, &key);
            // Behind what others broke may be anything that was there once.
            let is_open = before.is_none() && self.is_meddled;
            let is_known = now.is_none() || now == before || now == Some(wanted.clone());
            assert!(is_known || is_open, "between, a reader sees what never was");
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 128, ..ProptestConfig::default() })]

    #[test]
    fn whatever_happens_a_pool_comes_to_be_what_it_is_to_be(start in 0..300usize, acts in acts()) {
        let mut bench = Bench::new(devices(start));
        for act in &acts {
            bench.act(act);
        }
        bench.carry_out(usize::MAX);
        bench.settle();
    }
}
