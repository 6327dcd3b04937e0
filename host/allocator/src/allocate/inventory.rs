//! The devices of a node, from ResourceSlices: pools in the order of allocation, and why a pool cannot be used.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::{Arc, LazyLock};

use k8s_openapi::api::resource::v1::{Device, ResourceSlice};
use nodedock_model::quantity;

use super::capacity::{self, Capacity};
use super::node::{NodeRef, NodeSelection};
use super::selector_results::SelectorResults;
use crate::selector::DeviceFacts;

/// The devices of a node, prepared once per change of slices and shared by allocations.
///
/// Only the newest generation of a pool counts, over all its slices. A pool is used if all slices of that generation are there, no two of
/// its devices for this node have the same name, and every counter that a device consumes exists. Devices are in the order in which the
/// scheduler tries them: pools without binding conditions first, then by driver, pool, slice, and place in the slice.
pub struct Inventory {
    pub(super) node: NodeRef,
    pub(super) devices: Vec<Offered>,
    pub(super) pools: Vec<Pool>,
    pub(super) counters: Vec<CounterTotal>,
    pub(super) refused: Vec<RefusedPool>,
    pub(super) selector_results: SelectorResults,
}

/// A pool whose devices can be allocated.
pub(super) struct Pool {
    pub(super) driver: String,
    pub(super) name: String,
    pub(super) members: HashMap<String, PoolMember>,
}

/// The devices of one name in the slices of a pool. A pool can have it again for other nodes.
#[derive(Default)]
pub(super) struct PoolMember {
    /// The number of the device that targets this node.
    pub(super) local: Option<u32>,
    /// Consumption of the pool's counters by the devices for other nodes, as counter and amount.
    pub(super) remote: Vec<(u32, i128)>,
}

/// A pool with devices for this node of which none can be allocated.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct RefusedPool {
    pub(super) driver: String,
    pub(super) pool: String,
    pub(super) reason: String,
}

pub(super) struct CounterTotal {
    pub(super) set: String,
    pub(super) name: String,
    pub(super) total: i128,
}

/// A device of a usable pool.
pub(super) struct Offered {
    pub(super) id: u32,
    slice: Arc<ResourceSlice>,
    place: usize,
    pub(super) facts: DeviceFacts,
    /// False: the device is in a slice for this node, and is itself for another one.
    pub(super) on_node: bool,
    /// It has a sentence instead of capacities if one of them has no meaning.
    pub(super) capacities: Result<Vec<Capacity>, String>,
    /// Numbers of counters with what the device consumes of them.
    pub(super) consumes: Vec<(u32, i128)>,
}

impl Offered {
    pub(super) fn slice(&self) -> &ResourceSlice {
        &self.slice
    }

    pub(super) fn device(&self) -> &Device {
        static NONE: LazyLock<Device> = LazyLock::new(Device::default);
        let devices = self.slice.spec.devices.as_deref().unwrap_or_default();
        devices.get(self.place).unwrap_or(&NONE)
    }

    /// Returns true if several claims can each have a share of the device.
    pub(super) fn is_shareable(&self) -> bool {
        self.device().allow_multiple_allocations == Some(true)
    }

    pub(super) fn driver(&self) -> &str {
        &self.slice.spec.driver
    }

    pub(super) fn pool(&self) -> &str {
        &self.slice.spec.pool.name
    }
}

impl std::fmt::Display for Offered {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "{}/{}/{}",
            self.driver(),
            self.pool(),
            self.device().name
        )
    }
}

impl Inventory {
    /// Returns the devices that slices offer to a node. The order of the slices makes no difference.
    pub fn new(slices: impl Iterator<Item = Arc<ResourceSlice>>, node: &NodeRef) -> Self {
        let mut by_pool: BTreeMap<(String, String), Vec<Arc<ResourceSlice>>> = BTreeMap::new();
        for slice in slices {
            let pool = (slice.spec.driver.clone(), slice.spec.pool.name.clone());
            by_pool.entry(pool).or_default().push(slice);
        }
        let mut inventory = Self {
            node: node.clone(),
            devices: Vec::new(),
            pools: Vec::new(),
            counters: Vec::new(),
            refused: Vec::new(),
            selector_results: SelectorResults::new(0),
        };
        let mut with_binding_conditions = Vec::new();
        for ((driver, pool), slices) in by_pool {
            match PoolSlices::gather(slices, node) {
                Ok(None) => {}
                Ok(Some(gathered)) if gathered.has_binding_conditions() => {
                    with_binding_conditions.push((driver, pool, gathered));
                }
                Ok(Some(gathered)) => inventory.add_pool(driver, pool, gathered),
                Err(reason) => inventory.refused.push(RefusedPool {
                    driver,
                    pool,
                    reason,
                }),
            }
        }
        for (driver, pool, gathered) in with_binding_conditions {
            inventory.add_pool(driver, pool, gathered);
        }
        inventory.selector_results = SelectorResults::new(inventory.devices.len());
        inventory
    }

    /// Returns the number of devices of usable pools.
    pub fn len(&self) -> usize {
        self.devices.len()
    }

    pub fn is_empty(&self) -> bool {
        self.devices.is_empty()
    }

    pub(super) fn device(&self, id: u32) -> Option<&Offered> {
        self.devices.get(id as usize)
    }

    pub(super) fn counter(&self, number: u32) -> Option<&CounterTotal> {
        self.counters.get(number as usize)
    }

    fn add_pool(&mut self, driver: String, name: String, slices: PoolSlices) {
        match self.parse_pool(slices) {
            Ok(parsed) => {
                self.devices.extend(parsed.devices);
                self.counters.extend(parsed.counters);
                self.pools.push(Pool {
                    driver,
                    name,
                    members: parsed.members,
                });
            }
            Err(reason) => self.refused.push(RefusedPool {
                driver,
                pool: name,
                reason,
            }),
        }
    }

    fn parse_pool(&self, slices: PoolSlices) -> Result<ParsedPool, String> {
        let mut parsed = ParsedPool::default();
        let numbers = parsed.add_counters(&slices.counters, self.counters.len())?;
        for slice in slices.elsewhere {
            for device in slice.spec.devices.iter().flatten() {
                let consumes = consumption(device, &numbers)?;
                parsed
                    .members
                    .entry(device.name.clone())
                    .or_default()
                    .remote
                    .extend(consumes);
            }
        }
        let mut names = BTreeSet::new();
        for slice in slices.here {
            for (place, device) in slice.spec.devices.iter().flatten().enumerate() {
                if !names.insert(device.name.clone()) {
                    return Err(format!("device name {:?} occurs twice", device.name));
                }
                let id = u32::try_from(self.devices.len() + parsed.devices.len())
                    .map_err(|_| "there are too many devices".to_owned())?;
                parsed.members.entry(device.name.clone()).or_default().local = Some(id);
                parsed.devices.push(Offered {
                    id,
                    place,
                    facts: DeviceFacts::new(&slice.spec.driver, device),
                    on_node: device_is_for(device, &slice, &self.node)?,
                    capacities: device
                        .capacity
                        .as_ref()
                        .map_or(Ok(Vec::new()), capacity::parse),
                    consumes: consumption(device, &numbers)?,
                    slice: Arc::clone(&slice),
                });
            }
        }
        Ok(parsed)
    }
}

fn device_is_for(device: &Device, slice: &ResourceSlice, node: &NodeRef) -> Result<bool, String> {
    if slice.spec.per_device_node_selection != Some(true) {
        return Ok(true);
    }
    device_selection(device)
        .includes(node)
        .map_err(|error| format!("device {:?}: {error}", device.name))
}

fn device_selection(device: &Device) -> NodeSelection<'_> {
    NodeSelection {
        node_name: device.node_name.as_deref(),
        all_nodes: device.all_nodes == Some(true),
        selector: device.node_selector.as_ref(),
    }
}

/// Returns what a device consumes, by the number of the counter.
fn consumption(device: &Device, numbers: &CounterNumbers<'_>) -> Result<Vec<(u32, i128)>, String> {
    let mut consumed: BTreeMap<u32, i128> = BTreeMap::new();
    for consumption in device.consumes_counters.iter().flatten() {
        let set = &consumption.counter_set;
        let counters = numbers.get(set.as_str()).ok_or_else(|| {
            format!(
                "device {:?} consumes of counter set {set:?}, which the pool does not have",
                device.name
            )
        })?;
        for (name, counter) in &consumption.counters {
            let number = counters.get(name.as_str()).ok_or_else(|| {
                format!(
                    "device {:?} consumes counter {name:?}, which counter set {set:?} does not have",
                    device.name
                )
            })?;
            let amount = amount(&counter.value.0, set, name)?;
            let sum = consumed.entry(*number).or_default();
            *sum = sum.saturating_add(amount);
        }
    }
    Ok(consumed.into_iter().collect())
}

fn amount(text: &str, set: &str, name: &str) -> Result<i128, String> {
    quantity::nanos(text)
        .ok_or_else(|| format!("counter {name:?} of set {set:?}: {text:?} is no quantity"))
}

type CounterNumbers<'a> = HashMap<&'a str, HashMap<&'a str, u32>>;

#[derive(Default)]
struct ParsedPool {
    devices: Vec<Offered>,
    counters: Vec<CounterTotal>,
    members: HashMap<String, PoolMember>,
}

impl ParsedPool {
    fn add_counters<'a>(
        &mut self,
        slices: &'a [Arc<ResourceSlice>],
        first: usize,
    ) -> Result<CounterNumbers<'a>, String> {
        let mut numbers = CounterNumbers::new();
        for set in slices
            .iter()
            .filter_map(|slice| slice.spec.shared_counters.as_ref())
            .flatten()
        {
            let mut counters = HashMap::new();
            for (name, counter) in &set.counters {
                let number = u32::try_from(first + self.counters.len())
                    .map_err(|_| "there are too many counters".to_owned())?;
                counters.insert(name.as_str(), number);
                let total = amount(&counter.value.0, &set.name, name)?;
                self.counters.push(CounterTotal {
                    set: set.name.clone(),
                    name: name.clone(),
                    total,
                });
            }
            if numbers.insert(set.name.as_str(), counters).is_some() {
                return Err(format!("counter set {:?} occurs twice", set.name));
            }
        }
        Ok(numbers)
    }
}

/// The slices of the newest generation of a pool, by what they are for this node.
#[derive(Default)]
struct PoolSlices {
    here: Vec<Arc<ResourceSlice>>,
    elsewhere: Vec<Arc<ResourceSlice>>,
    counters: Vec<Arc<ResourceSlice>>,
}

impl PoolSlices {
    /// Returns nothing if no slice is for this node.
    fn gather(mut slices: Vec<Arc<ResourceSlice>>, node: &NodeRef) -> Result<Option<Self>, String> {
        let newest = slices.iter().map(|slice| slice.spec.pool.generation).max();
        slices.retain(|slice| Some(slice.spec.pool.generation) == newest);
        slices.sort_by(|a, b| a.metadata.name.cmp(&b.metadata.name));
        let found = i64::try_from(slices.len()).unwrap_or(i64::MAX);
        let expected = slices
            .iter()
            .map(|slice| slice.spec.pool.resource_slice_count)
            .find(|count| *count != found);
        let mut gathered = Self::default();
        let mut relevant = false;
        for slice in slices {
            let here = slice_is_for(&slice, node)?;
            relevant |= here;
            match (
                slice
                    .spec
                    .shared_counters
                    .as_ref()
                    .is_some_and(|sets| !sets.is_empty()),
                here,
            ) {
                (true, _) => gathered.counters.push(slice),
                (false, true) => gathered.here.push(slice),
                (false, false) => gathered.elsewhere.push(slice),
            }
        }
        match expected {
            _ if !relevant => Ok(None),
            Some(expected) => Err(format!(
                "the pool is being updated: it has {found} of {expected} slices"
            )),
            None => Ok(Some(gathered)),
        }
    }

    fn has_binding_conditions(&self) -> bool {
        let mut devices = self
            .here
            .iter()
            .filter_map(|slice| slice.spec.devices.as_ref())
            .flatten();
        devices.any(|device| device.binding_conditions.is_some())
    }
}

fn slice_is_for(slice: &ResourceSlice, node: &NodeRef) -> Result<bool, String> {
    let spec = &slice.spec;
    let selection = NodeSelection {
        node_name: spec.node_name.as_deref(),
        all_nodes: spec.all_nodes == Some(true),
        selector: spec.node_selector.as_ref(),
    };
    if spec.per_device_node_selection != Some(true) {
        return selection.includes(node);
    }
    let mut included = false;
    for device in spec.devices.iter().flatten() {
        included |= device_is_for(device, slice, node)?;
    }
    Ok(included)
}
