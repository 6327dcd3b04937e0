//! The families about single devices, and about claims that wait for one. A node may have more devices than a scrape should have series, so the first ones
//! alone have series of their own; the numbers of a pool count all.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::Arc;

use prometheus_client::metrics::gauge::ConstGauge;

use super::super::{Admin, families};
use super::Exposition;
use nodedock_base::clock::now_ms;
use nodedock_core::driver::Published;
use nodedock_core::manager::PodView;
use nodedock_model::{
    AllocatedDevice, AttributeValue, ClaimRecord, ClaimState, Device, DriverName, HealthState, Uid,
};

/// Maximum number of devices, and of uses of devices, with series of their own.
const DEVICE_SERIES_MAX: usize = 4096;

/// Attribute of a device with its address on the PCI bus, and the identity string that says the same.
const PCI_ADDRESS: &str = "resource.kubernetes.io/pciBusID";
const PCI_IDENTITY: &str = "pci:";
/// States of a device.
const HELD: &str = "held";
const FREE: &str = "free";
const UNHEALTHY: &str = "unhealthy";
/// Name of an attribute, of any domain, by which other exporters name a device.
const UUID: &str = "uuid";

pub(super) fn encode(admin: &Admin, out: &mut Exposition<'_>) -> fmt::Result {
    let published = admin.registry.instances.published();
    let devices = devices(&published, |driver, pool, device| {
        let users = admin.manager.records.users_of_device(driver, pool, device);
        users.len() as u64
    });
    out.gauges(families::DEVICES, numbers(&published, &devices))?;
    let series = || devices.iter().take(DEVICE_SERIES_MAX);
    let held = series().map(|device| (device.labels(), device.claims));
    out.gauges(families::DEVICE_CLAIMS, held)?;
    let healthy = series().filter_map(|device| {
        let is_healthy = match device.health {
            HealthState::Healthy => 1,
            HealthState::Unhealthy => 0,
            HealthState::Unknown => return None,
        };
        Some((device.labels(), is_healthy))
    });
    out.gauges(families::DEVICE_HEALTHY, healthy)?;
    let claims = admin.manager.records.claims();
    let uses = uses(&claims, &admin.manager.pods.list(), &published);
    let uses = uses.into_iter().take(DEVICE_SERIES_MAX);
    out.gauges(families::DEVICE_INFO, uses.map(|labels| (labels, 1)))
}

pub(super) fn encode_waiting(admin: &Admin, out: &mut Exposition<'_>) -> fmt::Result {
    let waiting = admin.local_claims.as_ref().map(|claims| claims.pending());
    let number = waiting.as_ref().map(|waiting| waiting.number as u64);
    out.metric(
        families::CLAIMS_PENDING,
        number.map(ConstGauge::new).as_ref(),
    )?;
    let seconds = waiting.map(|waiting| match waiting.oldest_ms {
        Some(since) => now_ms().saturating_sub(since) as f64 / 1000.0,
        None => 0.0,
    });
    out.metric(families::CLAIM_WAIT, seconds.map(ConstGauge::new).as_ref())
}

/// A device of a driver that serves.
struct DeviceSeries<'a> {
    driver: &'a str,
    pool: &'a str,
    device: &'a str,
    /// Number of claims that hold it.
    claims: u64,
    health: HealthState,
}

impl DeviceSeries<'_> {
    fn labels(&self) -> [&str; 3] {
        [self.driver, self.pool, self.device]
    }

    fn state(&self) -> &'static str {
        match (self.claims, self.health) {
            (0, HealthState::Unhealthy) => UNHEALTHY,
            (0, _) => FREE,
            _ => HELD,
        }
    }
}

/// Number of devices by driver, pool and state: each pool has every state, with zero as well.
fn numbers<'a>(
    published: &'a [(DriverName, Arc<Published>)],
    devices: &[DeviceSeries<'a>],
) -> BTreeMap<[&'a str; 3], u64> {
    let mut numbers = BTreeMap::new();
    for (driver, published) in published {
        for pool in published.inventory.pools.keys() {
            let states =
                [HELD, FREE, UNHEALTHY].map(|state| [driver.as_str(), pool.as_str(), state]);
            numbers.extend(states.map(|labels| (labels, 0)));
        }
    }
    for device in devices {
        *numbers
            .entry([device.driver, device.pool, device.state()])
            .or_default() += 1;
    }
    numbers
}

/// The devices of all drivers, by driver, pool and name.
fn devices<'a>(
    published: &'a [(DriverName, Arc<Published>)],
    claims: impl Fn(&DriverName, &str, &str) -> u64,
) -> Vec<DeviceSeries<'a>> {
    let mut all = Vec::new();
    for (driver, published) in published {
        for (pool_name, pool) in &published.inventory.pools {
            for name in pool.devices.keys() {
                let health = published.health.get(&(pool_name.clone(), name.clone()));
                all.push(DeviceSeries {
                    driver: driver.as_str(),
                    pool: pool_name.as_str(),
                    device: name.as_str(),
                    claims: claims(driver, pool_name.as_str(), name.as_str()),
                    health: health.map_or(HealthState::Unknown, |health| health.state),
                });
            }
        }
    }
    all
}

/// A container of a pod that uses a claim.
struct User<'a> {
    pod: &'a str,
    container: &'a str,
    /// `None`: it uses every request of the claim.
    request: Option<&'a str>,
}

impl User<'_> {
    fn has(&self, device: &AllocatedDevice) -> bool {
        self.request
            .is_none_or(|request| request == device.request || request == device.base_request())
    }
}

/// The containers of all pods, by the UIDs of the claims that they use.
fn users(pods: &[PodView]) -> BTreeMap<&Uid, Vec<User<'_>>> {
    let mut users: BTreeMap<&Uid, Vec<User<'_>>> = BTreeMap::new();
    for pod in pods {
        for resource in &pod.resources {
            users.entry(&resource.claim).or_default().push(User {
                pod: pod.pod.name.as_str(),
                container: &resource.container,
                request: None,
            });
        }
        if let Some(record) = &pod.record {
            for container in &record.containers {
                for used in &container.claims {
                    let Some(claim) = record.claims.get(&used.pod_claim_name) else {
                        continue;
                    };
                    users.entry(&claim.uid).or_default().push(User {
                        pod: pod.pod.name.as_str(),
                        container: &container.name,
                        request: used.request.as_deref(),
                    });
                }
            }
        }
    }
    users
}

/// Labels of the devices of prepared claims: namespace, pod, container, claim, driver, pool, device, UUID, PCI address. What is not known is empty: a kubelet
/// does not name the containers.
fn uses(
    claims: &[Arc<ClaimRecord>],
    pods: &[PodView],
    published: &[(DriverName, Arc<Published>)],
) -> BTreeSet<[String; 9]> {
    let users = users(pods);
    let published: BTreeMap<_, _> = published.iter().map(|(name, is)| (name, is)).collect();
    let mut found = BTreeSet::new();
    for claim in claims
        .iter()
        .filter(|claim| claim.state == ClaimState::Prepared)
    {
        let of_pods = users.get(&claim.id.uid).map_or(&[][..], Vec::as_slice);
        let consumers = claim.consumers();
        for allocated in &claim.allocation.devices {
            let device = published
                .get(&allocated.driver)
                .and_then(|of| of.inventory.device(&allocated.pool, &allocated.device));
            let labels = |pod: &str, container: &str| {
                [
                    claim.id.namespace.to_string(),
                    pod.to_owned(),
                    container.to_owned(),
                    claim.id.name.to_string(),
                    allocated.driver.to_string(),
                    allocated.pool.to_string(),
                    allocated.device.to_string(),
                    device.and_then(uuid).unwrap_or_default(),
                    device.and_then(pci_address).unwrap_or_default(),
                ]
            };
            let before = found.len();
            let using = of_pods.iter().filter(|user| user.has(allocated));
            found.extend(using.map(|user| labels(user.pod, user.container)));
            if found.len() > before {
                continue;
            }
            found.extend(
                consumers
                    .iter()
                    .map(|consumer| labels(consumer.name.as_str(), "")),
            );
            if consumers.is_empty() {
                found.insert(labels("", ""));
            }
        }
    }
    found
}

fn text(value: &AttributeValue) -> Option<String> {
    match value {
        AttributeValue::Text(text) => Some(text.clone()),
        _ => None,
    }
}

fn uuid(device: &Device) -> Option<String> {
    let mut attributes = device.attributes.iter();
    attributes.find_map(|(name, value)| {
        let (_, local) = name
            .as_str()
            .rsplit_once('/')
            .unwrap_or(("", name.as_str()));
        local
            .eq_ignore_ascii_case(UUID)
            .then(|| text(value))
            .flatten()
    })
}

fn pci_address(device: &Device) -> Option<String> {
    let mut attributes = device.attributes.iter();
    let attribute = attributes.find(|(name, _)| name.as_str() == PCI_ADDRESS);
    attribute.and_then(|(_, value)| text(value)).or_else(|| {
        let mut identities = device.identity.iter();
        identities.find_map(|identity| identity.strip_prefix(PCI_IDENTITY).map(str::to_owned))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use nodedock_model::{
        DeviceHealth, DeviceName, Inventory, ObjectRef, Pool, PoolName, QualifiedName,
    };

    fn published() -> Vec<(DriverName, Arc<Published>)> {
        let attribute = |name: &str, value: &str| {
            let name = QualifiedName::new(name).unwrap();
            (name, AttributeValue::Text(value.to_owned()))
        };
        let first = Device {
            attributes: BTreeMap::from([
                attribute("UUID", "GPU-1"),
                attribute(PCI_ADDRESS, "0000:3b:00.0"),
            ]),
            ..Device::default()
        };
        let second = Device {
            identity: vec!["pci:0000:5e:00.0".to_owned()],
            ..Device::default()
        };
        let names = ["a", "b", "c"].map(|name| DeviceName::new(name).unwrap());
        let devices = [first, second, Device::default()];
        let pool = PoolName::new("p").unwrap();
        let health = DeviceHealth {
            state: HealthState::Unhealthy,
            ..DeviceHealth::default()
        };
        let published = Published {
            health: BTreeMap::from([((pool.clone(), names[2].clone()), health)]),
            inventory: Inventory {
                pools: BTreeMap::from([(
                    pool,
                    Pool {
                        devices: names.into_iter().zip(devices).collect(),
                        ..Pool::default()
                    },
                )]),
            },
            ..Published::default()
        };
        vec![(
            DriverName::new("gpu.example.com").unwrap(),
            Arc::new(published),
        )]
    }

    #[test]
    fn devices_are_held_free_or_unhealthy() {
        let published = published();
        let devices = devices(&published, |_, _, device| u64::from(device == "a"));
        let states: Vec<_> = devices
            .iter()
            .map(|device| (device.device, device.state()))
            .collect();
        assert_eq!(states, [("a", "held"), ("b", "free"), ("c", "unhealthy")]);
        let all = super::devices(&published, |_, _, _| 1);
        let numbers: Vec<_> = numbers(&published, &all).into_iter().collect();
        let labels = |state| ["gpu.example.com", "p", state];
        assert_eq!(
            numbers,
            [(labels(FREE), 0), (labels(HELD), 3), (labels(UNHEALTHY), 0)]
        );
    }

    #[test]
    fn uses_have_uuid_and_pci_address() {
        let published = published();
        let id = ObjectRef::new("default", "claim", "uid").unwrap();
        let mut claim = ClaimRecord::new(id, ClaimState::Prepared, "boot");
        claim.allocation.devices = ["a", "b", "gone"]
            .map(|device| {
                AllocatedDevice::whole(
                    "r",
                    published[0].0.clone(),
                    PoolName::new("p").unwrap(),
                    DeviceName::new(device).unwrap(),
                )
            })
            .to_vec();
        let pod = ObjectRef::new("default", "pod", "uid-pod").unwrap();
        claim.pods.insert(pod.uid.clone(), pod);
        let mut open = claim.clone();
        open.state = ClaimState::Preparing;
        let found = uses(&[Arc::new(claim), Arc::new(open)], &[], &published);
        let shown: Vec<_> = found.iter().map(|labels| labels.join(" ")).collect();
        assert_eq!(
            shown,
            [
                "default pod  claim gpu.example.com p a GPU-1 0000:3b:00.0",
                "default pod  claim gpu.example.com p b  0000:5e:00.0",
                "default pod  claim gpu.example.com p gone  ",
            ]
        );
    }
}
