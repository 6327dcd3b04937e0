//! Diffs of a pool, carried out on a server that is a map.

use std::collections::BTreeMap;
use std::sync::Arc;

use proptest::prelude::*;
use serde_json::{Value, json};

use super::super::diff::{CounterPlacement, DesiredPool, Diff, KnownPool, Write, diff};
use super::super::entry::Entry;
use super::super::slice;
use super::*;
use crate::slices::diff::SLICE_PREFIX_BYTES_MAX;
use nodedock_model::CounterSet;

/// The slices of a server, by name.
#[derive(Default)]
struct Store {
    slices: BTreeMap<String, Arc<Slice>>,
    revision: u64,
}

impl Store {
    fn all(&self) -> Vec<Arc<Slice>> {
        self.slices.values().cloned().collect()
    }

    fn names(&self) -> Vec<String> {
        self.slices.keys().cloned().collect()
    }

    fn put(&mut self, mut slice: Slice) {
        self.revision += 1;
        for device in slice.spec.content.devices.values_mut() {
            let mut json = device.json().clone();
            for taint in json
                .get_mut("taints")
                .and_then(Value::as_array_mut)
                .into_iter()
                .flatten()
            {
                if taint.get("timeAdded").is_none() {
                    taint["timeAdded"] = format!("added-at-{}", self.revision).into();
                }
            }
            *device = Entry::from(json);
        }
        let prefix = slice.metadata.generate_name.clone().unwrap_or_default();
        let name = slice
            .metadata
            .name
            .get_or_insert_with(|| format!("{prefix}{:05}", self.revision))
            .clone();
        self.slices.insert(name, Arc::new(slice));
    }

    fn carry_out(&mut self, write: &Write) {
        match write {
            Write::Delete(slice) => drop(self.slices.remove(slice::name(slice))),
            Write::Update(slice) | Write::Create(slice) => self.put(slice.clone()),
        }
    }

    /// Another client changes a slice.
    fn edit(&mut self, name: &str, change: impl FnOnce(&mut Slice)) {
        let mut slice = (*self.slices[name]).clone();
        change(&mut slice);
        self.put(slice);
    }
}

struct Bench {
    store: Store,
    pool: Pool,
    known: KnownPool,
    /// Another client wrote since the pool was as desired.
    is_foreign: bool,
}

fn gpus() -> PoolKey {
    key(GPU, "p")
}

fn planned(
    content: &Content,
    node: &NodeFacts,
    counters: CounterPlacement,
) -> Result<Diff, String> {
    let desired = DesiredPool {
        key: &gpus(),
        node,
        content,
        counters,
        known: &KnownPool::default(),
    };
    diff(&desired, &[]).map_err(|error| error.to_string())
}

impl Bench {
    fn new(pool: Pool) -> Self {
        Self {
            store: Store::default(),
            pool,
            known: KnownPool::default(),
            is_foreign: false,
        }
    }

    fn diff(&mut self) -> Diff {
        let (content, slices) = (content(&self.pool), self.store.all());
        self.known.observe(&slices, &content);
        let (content, counters) = (&content, CounterPlacement::OwnSlice);
        let desired = DesiredPool {
            key: &gpus(),
            node: &node(),
            content,
            counters,
            known: &self.known,
        };
        diff(&desired, &slices).unwrap()
    }

    /// Carries a diff out and returns the number of writes.
    fn settle(&mut self) -> usize {
        let diff = self.diff();
        diff.writes
            .iter()
            .for_each(|write| self.store.carry_out(write));
        let slices = self.store.all();
        assert_eq!(visible(&slices, &gpus()), Some(content(&self.pool)));
        assert_eq!(slices.len(), diff.slices);
        assert!(
            slices
                .iter()
                .all(|slice| slice.spec.pool.generation == diff.generation),
            "{slices:?}"
        );
        assert!(self.diff().writes.is_empty(), "nothing is left to be done");
        self.known
            .written(&slices, &content(&self.pool), diff.generation);
        self.is_foreign = false;
        diff.writes.len()
    }

    fn generation(&self) -> i64 {
        self.store
            .all()
            .iter()
            .map(|slice| slice.spec.pool.generation)
            .max()
            .unwrap_or(0)
    }

    fn device(&mut self, index: usize) -> &mut Device {
        self.pool.devices.get_mut(&device_name(index)).unwrap()
    }
}

#[test]
fn single_change_keeps_the_generation() {
    let mut bench = Bench::new(devices(1000));
    assert_eq!((bench.settle(), bench.generation()), (8, 1));
    bench.device(700).allow_multiple_allocations = true;
    assert_eq!((bench.settle(), bench.generation()), (1, 1));
    bench.pool.devices.remove(&device_name(5));
    assert_eq!((bench.settle(), bench.generation()), (1, 1));
    // It takes the place of the one that left.
    bench
        .pool
        .devices
        .insert(device_name(5000), Device::default());
    assert_eq!((bench.settle(), bench.generation()), (1, 1));
}

#[test]
fn multi_slice_change_starts_a_generation() {
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
fn only_the_deleted_slice_is_recreated() {
    let mut bench = Bench::new(devices(300));
    bench.settle();
    let name = bench.store.names().remove(1);
    bench.store.slices.remove(&name);
    assert_eq!((bench.settle(), bench.generation()), (1, 1));
    let names: Vec<_> = bench
        .store
        .names()
        .iter()
        .map(|name| name[..5].to_owned())
        .collect();
    assert_eq!(names, ["00000", "00001", "00002"]);
}

#[test]
fn counter_placement_depends_on_server_version() {
    let set = |name: &str, counter: &str, value: &str| CounterSet {
        name: name.to_owned(),
        counters: [(counter.to_owned(), value.to_owned())].into(),
    };
    let mut pool = devices(70);
    pool.shared_counters = vec![set("memory", "bytes", "80Gi")];
    pool.devices
        .values_mut()
        .for_each(|device| device.consumes = vec![set("memory", "bytes", "10Gi")]);
    let mut bench = Bench::new(pool);
    assert_eq!(bench.settle(), 3);
    bench.pool.shared_counters = vec![set("memory", "bytes", "81920Mi")];
    assert_eq!(bench.settle(), 0, "it is the same amount");
    bench.pool.shared_counters = vec![set("memory", "bytes", "96Gi")];
    assert_eq!(bench.settle(), 1);

    let together = |pool: &Pool| planned(&content(pool), &node(), CounterPlacement::WithDevices);
    assert!(together(&bench.pool).unwrap_err().contains("70 devices"));
    bench.pool.devices.retain(|name, _| *name < device_name(64));
    let diff = together(&bench.pool).unwrap();
    let [Write::Create(slice)] = diff.writes.as_slice() else {
        panic!("{diff:?}")
    };
    assert_eq!(
        (
            slice.spec.content.devices.len(),
            slice.spec.content.shared_counters.len()
        ),
        (64, 1)
    );
}

#[test]
fn taints_keep_their_added_time() {
    let times = |bench: &Bench| -> Vec<String> {
        let slices = bench.store.all();
        let devices = slices
            .iter()
            .flat_map(|slice| slice.spec.content.devices.values());
        devices
            .flat_map(|device| {
                device
                    .taints()
                    .filter_map(|(_, time)| time.map(str::to_owned))
            })
            .collect()
    };
    let mut bench = Bench::new(devices(2));
    bench.device(0).taints = vec![taint("a")];
    bench.settle();
    let first = times(&bench);
    assert_eq!(first.len(), 1);
    bench.device(0).allow_multiple_allocations = true;
    assert_eq!(
        (bench.settle(), times(&bench)),
        (1, first.clone()),
        "another change"
    );
    bench.store.slices.clear();
    assert_eq!(
        (bench.settle(), times(&bench)),
        (1, first.clone()),
        "a kubelet's wipe"
    );
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
fn terminating_slice_is_replaced() {
    let mut bench = Bench::new(devices(200));
    bench.settle();
    let name = bench.store.names().remove(0);
    bench.store.edit(&name, |slice| {
        slice.metadata = serde_json::from_value(json!({
            "name": name, "deletionTimestamp": "2026-01-01T00:00:00Z",
        }))
        .unwrap();
    });
    let diff = bench.diff();
    diff.writes
        .iter()
        .for_each(|write| bench.store.carry_out(write));
    assert_eq!((diff.generation, diff.slices, diff.writes.len()), (2, 2, 2));
    assert_eq!(
        visible(&bench.store.all(), &gpus()),
        Some(content(&bench.pool))
    );
    assert!(bench.diff().writes.is_empty());
    bench.store.slices.remove(&name);
    assert_eq!(bench.settle(), 0);
}

#[test]
fn generation_wraps_to_one() {
    let mut bench = Bench::new(devices(200));
    bench.settle();
    for name in bench.store.names() {
        bench
            .store
            .edit(&name, |slice| slice.spec.pool.generation = i64::MAX);
    }
    assert_eq!(bench.settle(), 0, "what a server has is taken");
    bench.pool = devices(300);
    bench.settle();
    assert_eq!(bench.generation(), 1);
}

#[test]
fn slice_names_fit_and_contain_index() {
    let mut bench = Bench::new(devices(1));
    bench.settle();
    let name = bench.store.names().remove(0);
    assert!(name.starts_with("00000-gpu.example.com-node-1-"), "{name}");
    for name in [
        "n".repeat(253),
        format!("{}.b", "n".repeat(35)),
        "n".repeat(36) + "-x",
    ] {
        let node = NodeFacts {
            name: ObjectName::new(name).unwrap(),
            ..node()
        };
        let diff = planned(&content(&bench.pool), &node, CounterPlacement::OwnSlice).unwrap();
        let [Write::Create(slice)] = diff.writes.as_slice() else {
            panic!("{diff:?}")
        };
        let name_prefix = slice.metadata.generate_name.as_deref().unwrap();
        assert!(name_prefix.len() <= SLICE_PREFIX_BYTES_MAX, "{name_prefix}");
        assert!(
            ObjectName::new(format!("{name_prefix}abcde")).is_ok(),
            "{name_prefix}"
        );
    }
}

#[derive(Debug, Clone)]
enum Act {
    Add(usize, usize),
    Remove(usize, usize),
    Change(usize),
    Taint(usize),
    Counters(bool),
    /// Carries out so many writes of a diff, and no more.
    Crash(usize),
    Settle,
    Deleted(usize),
    /// Another client removes the first device of a slice.
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
        let names = self.store.names();
        let nth = |at: usize| names.get(at % names.len().max(1));
        self.is_foreign |= matches!(
            act,
            Act::Deleted(_)
                | Act::Emptied(_)
                | Act::Generation(..)
                | Act::Count(_)
                | Act::Copied(_)
        );
        match act {
            Act::Add(at, count) => {
                let added = (*at..at + count).map(|index| (device_name(index), Device::default()));
                let known = std::mem::take(&mut self.pool.devices);
                self.pool.devices = added.collect();
                self.pool.devices.extend(known);
            }
            Act::Remove(at, count) => {
                (*at..at + count)
                    .for_each(|index| drop(self.pool.devices.remove(&device_name(index))));
            }
            Act::Change(index) => {
                if let Some(device) = self.pool.devices.get_mut(&device_name(*index)) {
                    device.allow_multiple_allocations = !device.allow_multiple_allocations;
                }
            }
            Act::Taint(index) => {
                if let Some(device) = self.pool.devices.get_mut(&device_name(*index)) {
                    device.taints = if device.taints.is_empty() {
                        vec![taint("a")]
                    } else {
                        Vec::new()
                    };
                }
            }
            Act::Counters(on) => {
                let counters = [("c".to_owned(), "1".to_owned())].into();
                let set = CounterSet {
                    name: "s".to_owned(),
                    counters,
                };
                self.pool.shared_counters = if *on { vec![set] } else { Vec::new() };
            }
            Act::Crash(steps) => self.carry_out(*steps),
            Act::Settle => drop(self.settle()),
            Act::Deleted(at) => drop(nth(*at).map(|name| self.store.slices.remove(name))),
            Act::Emptied(at) => self.edit(nth(*at), |slice| {
                drop(slice.spec.content.devices.pop_first())
            }),
            Act::Generation(at, generation) => {
                self.edit(nth(*at), |slice| slice.spec.pool.generation = *generation);
            }
            Act::Count(at) => self.edit(nth(*at), |slice| slice.spec.pool.resource_slice_count = 2),
            Act::Copied(at) => self.edit(nth(*at), |slice| {
                let copy = format!("copy-of-{}", slice::name(slice));
                slice.metadata.name = Some(copy[..copy.len().min(200)].to_owned());
            }),
        }
    }

    fn edit(&mut self, name: Option<&String>, change: impl FnOnce(&mut Slice)) {
        if let Some(name) = name {
            self.store.edit(name, change);
        }
    }

    /// Carries out the first `writes` writes. After each write a reader sees the pool as it was before or as desired, or that it is not
    /// complete. Content that other clients mixed may look complete, and differ after each write.
    fn carry_out(&mut self, writes: usize) {
        let desired = content(&self.pool);
        let before = visible(&self.store.all(), &gpus());
        for write in self.diff().writes.into_iter().take(writes) {
            self.store.carry_out(&write);
            let now = visible(&self.store.all(), &gpus());
            let is_known = now.is_none() || now == before || now == Some(desired.clone());
            assert!(
                is_known || self.is_foreign,
                "between, a reader sees what never was"
            );
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 128, ..ProptestConfig::default() })]

    #[test]
    fn pool_always_converges(start in 0..300usize, acts in acts()) {
        let mut bench = Bench::new(devices(start));
        for act in &acts {
            bench.act(act);
        }
        bench.carry_out(usize::MAX);
        bench.settle();
    }
}
