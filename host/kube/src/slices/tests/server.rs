//! An API server as far as slices are concerned: it stores JSON, checks what a real one checks, and tells a watch.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard};

use async_trait::async_trait;
use serde_json::{Value, json};
use tokio::sync::{mpsc, watch};

use super::super::drivers::{Drivers, Look};
use super::super::planner::{Counters, Draft, Held, Step};
use super::super::view::SliceEvent;
use super::super::wire;
use super::super::{SliceApi, SliceError};
use crate::api::Version;

pub(super) struct Store {
    pub(super) version: Version,
    objects: BTreeMap<String, Value>,
    revision: u64,
    /// Fields of devices that this server does not know.
    pub(super) unknown: Vec<&'static str>,
}

impl Store {
    pub(super) fn new() -> Self {
        Self { version: Version::V1, objects: BTreeMap::new(), revision: 100, unknown: Vec::new() }
    }

    pub(super) fn held(&self) -> impl Iterator<Item = Held> {
        self.objects.values().map(|object| wire::held(self.version, object.clone()).unwrap())
    }

    pub(super) fn objects(&self) -> impl Iterator<Item = &Value> {
        self.objects.values()
    }

    fn revise(&mut self, mut object: Value) -> Value {
        self.revision += 1;
        object["metadata"]["resourceVersion"] = self.revision.to_string().into();
        let unknown = self.unknown.clone();
        for device in object["spec"]["devices"].as_array_mut().into_iter().flatten() {
            let device = device.as_object_mut().unwrap();
            unknown.iter().for_each(|field| drop(device.remove(*field)));
            for taint in device.get_mut("taints").and_then(Value::as_array_mut).into_iter().flatten() {
                if taint.get("timeAdded").is_none() {
                    taint["timeAdded"] = format!("added-at-{}", self.revision).into();
                }
            }
        }
        if object["spec"]["devices"].is_null() {
            object["spec"].as_object_mut().unwrap().remove("devices");
        }
        self.objects.insert(object["metadata"]["name"].as_str().unwrap().to_owned(), object.clone());
        object
    }

    fn create(&mut self, mut object: Value) -> Result<Value, String> {
        check(&object)?;
        let base = object["metadata"]["generateName"].as_str().unwrap().to_owned();
        assert!(base.len() <= 58, "{base} would be cut");
        let name = format!("{base}{:05}", self.revision);
        object["metadata"]["name"] = name.into();
        object["metadata"]["uid"] = format!("uid-{}", self.revision).into();
        Ok(self.revise(object))
    }

    fn update(&mut self, name: &str, object: Value) -> Result<Value, SliceError> {
        check(&object).map_err(SliceError::Refused)?;
        let known =
            self.objects.get(name).ok_or_else(|| SliceError::NotFound(format!("{name} not found")))?;
        for field in ["uid", "resourceVersion"] {
            if known["metadata"][field] != object["metadata"][field] {
                return Err(SliceError::Conflict("the object has been modified".to_owned()));
            }
        }
        for field in ["driver", "nodeName"] {
            assert_eq!(known["spec"][field], object["spec"][field], "{field} is immutable");
        }
        assert_eq!(known["spec"]["pool"]["name"], object["spec"]["pool"]["name"]);
        // What changes nothing gets no new version.
        let is_same = |field: &str| known[field] == object[field];
        if is_same("spec") && is_same("metadata") {
            return Ok(known.clone());
        }
        Ok(self.revise(object))
    }

    pub(super) fn remove(&mut self, name: &str) -> Option<Value> {
        self.revision += 1;
        self.objects.remove(name)
    }

    /// Somebody else changes an object.
    pub(super) fn edit(&mut self, name: &str, change: impl FnOnce(&mut Value)) -> Value {
        let mut object = self.objects[name].clone();
        change(&mut object);
        self.revise(object)
    }

    /// Carries out a step of a plan.
    pub(super) fn carry_out(&mut self, step: &Step) -> Result<(), String> {
        match step {
            Step::Delete(was) => drop(self.remove(&was.name)),
            Step::Update { was, draft } => {
                let updated = self.update(&was.name, wire::updated(self.version, was, draft));
                updated.map_err(|error| error.to_string())?;
            }
            Step::Create { generate_name, draft } => {
                self.create(wire::created(self.version, generate_name, draft))?;
            }
        }
        Ok(())
    }
}

/// What a server of 1.36 checks of a slice.
fn check(object: &Value) -> Result<(), String> {
    let spec = &object["spec"];
    let none = Vec::new();
    let devices = spec["devices"].as_array().unwrap_or(&none);
    let is_heavy = |device: &Value| {
        let device = device.get("basic").unwrap_or(device);
        !device["taints"].is_null() || !device["consumesCounters"].is_null()
    };
    let max = if devices.iter().any(is_heavy) { 64 } else { 128 };
    if devices.len() > max {
        return Err(format!("spec.devices: Too many: {}: must have at most {max} items", devices.len()));
    }
    if devices.iter().any(|device| device["name"].as_str().is_some_and(|name| name.starts_with("bad"))) {
        return Err("spec.devices[0].name: Invalid value".to_owned());
    }
    if spec["pool"]["resourceSliceCount"].as_i64() <= Some(0) || spec["pool"]["generation"].as_i64() < Some(0)
    {
        return Err("spec.pool: Invalid value".to_owned());
    }
    if !devices.is_empty() && spec["sharedCounters"].as_array().is_some_and(|sets| !sets.is_empty()) {
        return Err("spec: only one of devices and sharedCounters".to_owned());
    }
    Ok(())
}

/// Who is told.
type Watches = Vec<mpsc::UnboundedSender<SliceEvent>>;

#[derive(Clone)]
pub(super) struct Server(Arc<Inner>);

struct Inner {
    store: Mutex<Store>,
    /// Answers for the next writes, in place of carrying them out.
    faults: Mutex<VecDeque<SliceError>>,
    counters: Mutex<Counters>,
    /// Whether nobody is there.
    is_away: Mutex<bool>,
    writes: Mutex<Vec<String>>,
    watch: Mutex<Watches>,
}

impl Server {
    pub(super) fn new() -> Self {
        Self(Arc::new(Inner {
            store: Mutex::new(Store::new()),
            faults: Mutex::default(),
            counters: Mutex::default(),
            is_away: Mutex::default(),
            writes: Mutex::default(),
            watch: Mutex::default(),
        }))
    }

    pub(super) fn store(&self) -> MutexGuard<'_, Store> {
        self.0.store.lock().unwrap()
    }

    pub(super) fn follow(&self) -> mpsc::Receiver<SliceEvent> {
        let (sender, mut told) = mpsc::unbounded_channel();
        sender.send(SliceEvent::Listed(self.store().held().collect())).unwrap();
        self.0.watch.lock().unwrap().push(sender);
        let (events, receiver) = mpsc::channel(16);
        tokio::spawn(async move {
            while let Some(event) = told.recv().await {
                if events.send(event).await.is_err() {
                    return;
                }
            }
        });
        receiver
    }

    pub(super) fn list_again(&self) {
        self.tell(|store| SliceEvent::Listed(store.held().collect()));
    }

    /// Nobody is told what happens from now on.
    pub(super) fn lose_watch(&self) -> Watches {
        std::mem::take(&mut self.0.watch.lock().unwrap())
    }

    pub(super) fn find_watch(&self, watches: Watches) {
        *self.0.watch.lock().unwrap() = watches;
        self.list_again();
    }

    pub(super) fn fail(&self, faults: impl IntoIterator<Item = SliceError>) {
        self.0.faults.lock().unwrap().extend(faults);
    }

    /// Another release of it stands in its place.
    pub(super) fn wants_counters(&self, counters: Counters) {
        *self.0.counters.lock().unwrap() = counters;
    }

    pub(super) fn set_away(&self, is_away: bool) {
        *self.0.is_away.lock().unwrap() = is_away;
    }

    /// Writes since the last time: verb and name.
    pub(super) fn writes(&self) -> Vec<String> {
        std::mem::take(&mut self.0.writes.lock().unwrap())
    }

    /// As a kubelet does when it starts.
    pub(super) fn delete_all(&self) {
        let names: Vec<String> = self.store().held().map(|held| held.name).collect();
        names.iter().for_each(|name| self.delete_one(name));
    }

    pub(super) fn delete_one(&self, name: &str) {
        let removed = self.store().remove(name).unwrap();
        let uid = removed["metadata"]["uid"].as_str().unwrap().to_owned();
        self.tell(|_| SliceEvent::Deleted { name: name.to_owned(), uid: uid.clone() });
    }

    pub(super) fn edit(&self, name: &str, change: impl FnOnce(&mut Value)) {
        let object = self.store().edit(name, change);
        self.answer(object);
    }

    pub(super) fn create(&self, object: Value) {
        let object = self.store().create(object).unwrap();
        self.answer(object);
    }

    fn tell(&self, event: impl Fn(&Store) -> SliceEvent) {
        let store = self.store();
        // Who followed may be gone.
        self.0.watch.lock().unwrap().retain(|watch| watch.send(event(&store)).is_ok());
    }

    fn fault(&self, write: String) -> Result<(), SliceError> {
        self.0.writes.lock().unwrap().push(write);
        if *self.0.is_away.lock().unwrap() {
            return Err(SliceError::Away { words: "connection refused".to_owned(), retry_after: None });
        }
        self.0.faults.lock().unwrap().pop_front().map_or(Ok(()), Err)
    }

    fn answer(&self, object: Value) -> Held {
        let held = wire::held(self.store().version, object).unwrap();
        self.tell(|_| SliceEvent::Changed(Box::new(held.clone())));
        held
    }
}

#[async_trait]
impl SliceApi for Server {
    fn counters(&self) -> Counters {
        *self.0.counters.lock().unwrap()
    }

    async fn get(&self, name: &str) -> Result<Option<Held>, SliceError> {
        Ok(self.store().held().find(|held| held.name == name))
    }

    async fn create(&self, generate_name: &str, draft: &Draft) -> Result<Held, SliceError> {
        self.fault(format!("create {generate_name}"))?;
        let created = {
            let mut store = self.store();
            let object = wire::created(store.version, generate_name, draft);
            store.create(object).map_err(SliceError::Refused)?
        };
        Ok(self.answer(created))
    }

    async fn update(&self, was: &Held, draft: &Draft) -> Result<Held, SliceError> {
        self.fault(format!("update {}", was.name))?;
        let updated = {
            let mut store = self.store();
            let object = wire::updated(store.version, was, draft);
            store.update(&was.name, object)?
        };
        Ok(self.answer(updated))
    }

    async fn delete(&self, name: &str, uid: &str, resource_version: &str) -> Result<(), SliceError> {
        self.fault(format!("delete {name}"))?;
        let found = self.store().held().find(|held| held.name == name);
        match found {
            None => Err(SliceError::NotFound(format!("{name} not found"))),
            Some(held) if held.uid != uid || held.resource_version != resource_version => {
                Err(SliceError::Conflict("the object has been modified".to_owned()))
            }
            Some(_) => {
                self.delete_one(name);
                Ok(())
            }
        }
    }
}

/// Drivers as a test says.
pub(super) struct Told(pub(super) watch::Receiver<Look>);

#[async_trait]
impl Drivers for Told {
    fn look(&self) -> Look {
        self.0.borrow().clone()
    }

    async fn changed(&mut self) {
        if self.0.changed().await.is_err() {
            std::future::pending().await
        }
    }
}

/// A slice of somebody else.
pub(super) fn foreign(driver: &str, pool: &str, node: &str) -> Value {
    json!({
        "metadata": { "generateName": "foreign-" },
        "spec": {
            "driver": driver,
            "nodeName": node,
            "pool": { "name": pool, "generation": 1, "resourceSliceCount": 1 },
            "devices": [{ "name": "theirs" }],
        },
    })
}
