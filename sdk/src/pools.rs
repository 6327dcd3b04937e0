//! Pools that an operator's config describes: each has the devices whose attributes match.

use std::collections::{BTreeMap, BTreeSet};

use serde::Deserialize;
use serde_json::{Map, json};

use crate::{
    AllocatedDevice, AttributeValue, Configuration, Device, DeviceHealth, Driver, Inventory, Pool,
    Problem, matches_wildcards, parse_json,
};

/// A driver whose config is [`Pools`] and that takes no parameters in claims and classes: it has [`Configuration`] by that, for
/// [`export_driver!`](crate::export_driver).
///
/// ```
/// use nodedock_sdk::*;
///
/// struct Leds;
///
/// impl Driver for Leds {
///     fn describe() -> DriverInfo {
///         DriverInfo::new("leds.example.com", "0.1.0").sysfs_read(["class/leds/*"])
///     }
///
///     fn discover(host: &Host, ctx: &Context, _: &Trigger) -> Result<Inventory, Problem> {
///         let leds = host.sysfs().glob("class/leds/*")?.into_iter();
///         let leds = leds.map(|path| Device::new(dns_label(&last_segment(&path))).attribute("path", path));
///         Ok(Self::pools(&ctx.config)?.inventory(leds))
///     }
///
///     fn prepare(_: &Host, _: &Context, claim: &Claim) -> Result<Prepared, Problem> {
///         Prepared::each(claim, |_| Ok(ContainerEdits::new()))
///     }
/// }
///
/// impl PoolDriver for Leds {
///     const ATTRIBUTES: &'static [&'static str] = &["path"];
/// }
///
/// let problem = Leds::validate_config(r#"{"pools": [{"name": "p", "select": [{"pathh": "*"}]}]}"#).unwrap_err();
/// assert!(problem.message.contains("none of path"));
/// ```
pub trait PoolDriver: Driver {
    /// Text attributes that the selectors of a pool may name.
    const ATTRIBUTES: &'static [&'static str];

    /// Checks a pool of a config further.
    ///
    /// # Errors
    ///
    /// The reason why the pool cannot work, without its name.
    fn check_pool(pool: &PoolConfig) -> Result<(), String> {
        let _ = pool;
        Ok(())
    }

    /// Parses the driver's config.
    ///
    /// # Errors
    ///
    /// `invalid`, `bad-config`, for a config that cannot work on any node.
    fn pools(config: &str) -> Result<Pools, Problem> {
        let driver = Self::describe().name;
        let pools = Pools::read(&driver, config, Self::ATTRIBUTES)?;
        for pool in pools.pools() {
            Self::check_pool(pool).map_err(|reason| bad_pool(&driver, pool, &reason))?;
        }
        Ok(pools)
    }
}

impl<T: PoolDriver> Configuration for T {
    fn config_schema() -> Option<String> {
        Some(Pools::schema(&T::describe().name, T::ATTRIBUTES))
    }

    fn validate_config(config: &str) -> Result<(), Problem> {
        T::pools(config).map(drop)
    }

    fn validate_parameters(_: &str) -> Result<(), Problem> {
        let message = format!("{} takes no parameters", T::describe().name);
        Err(Problem::invalid("no-parameters", message))
    }
}

fn bad_pool(driver: &str, pool: &PoolConfig, reason: &str) -> Problem {
    let message = format!("config of {driver}: pool {:?}: {reason}", pool.name);
    Problem::invalid("bad-config", message)
}

/// The pools of a config, as `pools: [{name: cameras, select: [{driver: uvcvideo}, {vendor: "0x8086"}]}]`. A device is in the first pool that it
/// matches, and in none without a match: without pools there are no devices.
///
/// ```
/// use nodedock_sdk::{AllocatedDevice, Device, Pools};
///
/// let config = r#"{"pools": [{"name": "npus", "select": [{"vendor": "0x80*"}]}, {"name": "all"}]}"#;
/// let pools = Pools::read("accel", config, &["vendor"])?;
/// let npu = Device::new("0000-00-0b-0").attribute("vendor", "0x8086");
/// assert!(pools.inventory([npu.clone()]).device("npus", "0000-00-0b-0").is_some());
/// assert!(pools.has(&AllocatedDevice::new("r", "npus", "0000-00-0b-0"), &npu));
/// assert!(!pools.has(&AllocatedDevice::new("r", "all", "0000-00-0b-0"), &npu));
/// # Ok::<(), nodedock_sdk::Problem>(())
/// ```
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Pools {
    #[serde(default)]
    pools: Vec<PoolConfig>,
}

/// A pool of a config.
#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct PoolConfig {
    /// Unique: a DNS subdomain.
    pub name: String,
    /// Patterns by attribute, with `*` for any text and `?` for any byte. A device is in the pool if it matches all patterns of any entry;
    /// without entries, every device is.
    #[serde(default)]
    pub select: Vec<BTreeMap<String, String>>,
    /// Extended resource that also offers the devices.
    #[serde(default)]
    pub extended_resource: Option<String>,
}

impl Pools {
    /// Parses a driver's config, whose selectors may name these attributes.
    ///
    /// # Errors
    ///
    /// `invalid`, `bad-config`, for a config that cannot work on any node.
    pub fn read(driver: &str, config: &str, attributes: &[&str]) -> Result<Self, Problem> {
        let pools: Pools = parse_json("bad-config", &format!("config of {driver}"), config)?;
        let mut names = BTreeSet::new();
        for pool in &pools.pools {
            let mut keys = pool.select.iter().flat_map(BTreeMap::keys);
            let unknown = keys.find(|key| !attributes.contains(&key.as_str()));
            let reason = match unknown {
                Some(key) => format!(
                    "select has the key {key:?}, which is none of {}",
                    attributes.join(", ")
                ),
                None if !names.insert(&pool.name) => "its name occurs twice".to_owned(),
                None if pool.name.is_empty() || pool.name != pool.name.to_ascii_lowercase() => {
                    "its name must be a DNS subdomain".to_owned()
                }
                None => continue,
            };
            return Err(bad_pool(driver, pool, &reason));
        }
        Ok(pools)
    }

    /// Returns the JSON Schema of such a config, for [`Configuration::config_schema`](crate::Configuration::config_schema).
    pub fn schema(driver: &str, attributes: &[&str]) -> String {
        let pattern =
            json!({"description": "* is any text, ? any byte", "type": "string", "maxLength": 253});
        let patterns: Map<_, _> = attributes
            .iter()
            .map(|name| ((*name).to_owned(), pattern.clone()))
            .collect();
        json!({
            "$schema": "https://json-schema.org/draft/2020-12/schema",
            "title": format!("Config of {driver}"),
            "type": "object",
            "additionalProperties": false,
            "properties": {"pools": {
                "description": "A device is in the first pool that it matches; without pools there are no devices",
                "type": "array",
                "maxItems": 64,
                "items": {
                    "type": "object",
                    "additionalProperties": false,
                    "required": ["name"],
                    "properties": {
                        "name": {"type": "string", "maxLength": 253, "pattern": "^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$"},
                        "select": {
                            "description": "A device is in the pool if it matches all patterns of any entry; without entries, every device is",
                            "type": "array",
                            "maxItems": 256,
                            "items": {"type": "object", "additionalProperties": false, "properties": patterns},
                        },
                        "extendedResource": {
                            "description": "Extended resource under which the devices are offered as well",
                            "type": ["string", "null"],
                            "pattern": "^[a-z0-9]([-a-z0-9.]*[a-z0-9])?/[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?$",
                        },
                    },
                },
            }},
        })
        .to_string()
    }

    /// Returns the pools, in the order of the config.
    pub fn pools(&self) -> &[PoolConfig] {
        &self.pools
    }

    /// Returns the devices by pool; a device that no pool has is left out.
    pub fn inventory(&self, devices: impl IntoIterator<Item = Device>) -> Inventory {
        let mut pools: Vec<Pool> = self.pools.iter().map(PoolConfig::empty).collect();
        for device in devices {
            if let Some(index) = self.index_of(&device) {
                pools[index].devices.push(device);
            }
        }
        pools.into_iter().collect()
    }

    /// Returns whether the allocated device is this one, in the pool that has it now.
    pub fn has(&self, allocated: &AllocatedDevice, device: &Device) -> bool {
        let pool = self.pool_of(device);
        device.name == allocated.device && pool.is_some_and(|pool| pool.name == allocated.pool)
    }

    /// Returns the one of the driver's devices that was allocated. `describe` returns a device as the inventory has it.
    ///
    /// # Errors
    ///
    /// `not-found`, `no-such-device`: none is, or no pool has it.
    pub fn allocated<'a, T>(
        &self,
        allocated: &AllocatedDevice,
        all: impl IntoIterator<Item = &'a T>,
        describe: impl Fn(&T) -> Device,
    ) -> Result<&'a T, Problem> {
        let mut all = all.into_iter();
        all.find(|one| self.has(allocated, &describe(one)))
            .ok_or_else(|| self.no_such_device(allocated))
    }

    /// Returns the health of devices in their pools: unhealthy with a fault, the reason why a device cannot be used, and healthy without. Of a
    /// device that no pool has it returns nothing.
    ///
    /// # Errors
    ///
    /// The first problem among the devices: without an answer they keep their health.
    pub fn health(
        &self,
        judged: impl IntoIterator<Item = Result<(Device, Option<String>), Problem>>,
    ) -> Result<Vec<DeviceHealth>, Problem> {
        let mut health = Vec::new();
        for device in judged {
            let (device, fault) = device?;
            health.extend(self.pool_of(&device).map(|pool| match fault {
                Some(fault) => DeviceHealth::unhealthy(&pool.name, &device.name, fault),
                None => DeviceHealth::healthy(&pool.name, &device.name),
            }));
        }
        Ok(health)
    }

    /// Returns the problem of an allocated device that no pool has.
    pub fn no_such_device(&self, allocated: &AllocatedDevice) -> Problem {
        let AllocatedDevice { pool, device, .. } = allocated;
        let message =
            format!("device {pool}/{device} is gone, or the config does not offer it in this pool");
        Problem::not_found("no-such-device", message)
    }

    /// Returns the pool that has a device.
    pub fn pool_of(&self, device: &Device) -> Option<&PoolConfig> {
        self.index_of(device).map(|index| &self.pools[index])
    }

    fn index_of(&self, device: &Device) -> Option<usize> {
        self.pools.iter().position(|pool| pool.fits(device))
    }
}

impl PoolConfig {
    /// Returns whether it selects only what it names: it has entries, each with texts, and no text has a wildcard. For drivers of devices that no
    /// pattern may select by mistake, such as disks.
    pub fn is_exact(&self) -> bool {
        let is_exact = |entry: &BTreeMap<String, String>| {
            !entry.is_empty() && entry.values().all(|text| !text.contains(['*', '?']))
        };
        !self.select.is_empty() && self.select.iter().all(is_exact)
    }

    fn empty(&self) -> Pool {
        Pool::new(&self.name).extended_resource(self.extended_resource.clone())
    }

    fn fits(&self, device: &Device) -> bool {
        let is_match = |(name, pattern): (&String, &String)| match device.attribute_value(name) {
            Some(AttributeValue::Text(text)) => matches_wildcards(pattern, text),
            _ => false,
        };
        self.select.is_empty()
            || self
                .select
                .iter()
                .any(|selector| selector.iter().all(is_match))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(config: &str) -> Result<Pools, Problem> {
        Pools::read("test", config, &["driver", "vendor"])
    }

    #[test]
    fn first_matching_pool_has_the_device() {
        let pools = read(
            r#"{"pools": [
                {"name": "both", "select": [{"driver": "a*", "vendor": "1"}]},
                {"name": "either", "select": [{"driver": "b"}, {"vendor": "2"}], "extendedResource": "example.com/x"},
                {"name": "rest"}]}"#,
        )
        .unwrap();
        let device = |name: &str, driver: &str| Device::new(name).attribute("driver", driver);
        let inventory = pools.inventory([
            device("one", "ab").attribute("vendor", "1"),
            device("two", "ab"),
            device("three", "b"),
            Device::new("four").attribute("vendor", 2),
        ]);
        let names: Vec<Vec<&str>> = inventory
            .pools
            .iter()
            .map(|pool| pool.devices.iter().map(|device| &*device.name).collect())
            .collect();
        assert_eq!(names, [vec!["one"], vec!["three"], vec!["two", "four"]]);
        assert_eq!(
            inventory.pools[1].extended_resource.as_deref(),
            Some("example.com/x")
        );
        assert_eq!(read("{}").unwrap().inventory([device("x", "b")]).pools, []);
    }

    #[test]
    fn devices_are_judged_by_pool() {
        let pools = read(r#"{"pools": [{"name": "p", "select": [{"driver": "a"}]}]}"#).unwrap();
        let device = |name: &&str| Device::new(*name).attribute("driver", "a");
        let allocated = |pool: &str, name: &str| AllocatedDevice::new("r", pool, name);
        let names = ["one", "two"];
        assert_eq!(
            pools.allocated(&allocated("p", "two"), &names, device),
            Ok(&"two")
        );
        for (pool, name) in [("p", "three"), ("other", "two")] {
            let problem = pools.allocated(&allocated(pool, name), &names, device);
            assert_eq!(problem.unwrap_err().code, "no-such-device");
        }
        let judged = [
            Ok((device(&"one"), Some("too hot".to_owned()))),
            Ok((device(&"two"), None)),
            Ok((Device::new("of no pool"), None)),
        ];
        let expected = vec![
            DeviceHealth::unhealthy("p", "one", "too hot"),
            DeviceHealth::healthy("p", "two"),
        ];
        assert_eq!(pools.health(judged), Ok(expected));
        let failed = Problem::unavailable("io-error", "no memory");
        let judged = [Ok((device(&"one"), None)), Err(failed.clone())];
        assert_eq!(pools.health(judged), Err(failed));
    }

    #[test]
    fn wildcards_and_empty_selectors_are_inexact() {
        for (select, is_exact) in [
            (r#"[{"driver": "a"}, {"driver": "b", "vendor": "1"}]"#, true),
            ("[]", false),
            ("[{}]", false),
            (r#"[{"driver": "a"}, {"driver": "b*"}]"#, false),
            (r#"[{"driver": "a", "vendor": "?"}]"#, false),
        ] {
            let config = format!(r#"{{"pools": [{{"name": "p", "select": {select}}}]}}"#);
            let pools = read(&config).unwrap();
            assert_eq!(pools.pools()[0].is_exact(), is_exact, "{select}");
        }
    }

    #[test]
    fn schema_refuses_unknown_keys() {
        let schema: serde_json::Value =
            serde_json::from_str(&Pools::schema("test", &["driver"])).unwrap();
        let pools = &schema["properties"]["pools"]["items"];
        let select = &pools["properties"]["select"]["items"];
        for object in [&schema, pools, select] {
            assert_eq!(object["additionalProperties"], false);
        }
        assert_eq!(select["properties"]["driver"]["type"], "string");
        for key in ["name", "select", "extendedResource"] {
            assert!(pools["properties"].get(key).is_some(), "{key}");
        }
    }

    #[test]
    fn invalid_pools_are_refused_with_reason() {
        for (config, reason) in [
            (r#"{"pool": []}"#, "unknown field `pool`"),
            (r#"{"pools": [{}]}"#, "missing field `name`"),
            (
                r#"{"pools": [{"name": "a"}, {"name": "a"}]}"#,
                "config of test: pool \"a\": its name occurs twice",
            ),
            (r#"{"pools": [{"name": "A"}]}"#, "must be a DNS subdomain"),
            (
                r#"{"pools": [{"name": "a", "select": [{"drivr": "x"}]}]}"#,
                "select has the key \"drivr\", which is none of driver, vendor",
            ),
        ] {
            let problem = read(config).unwrap_err();
            assert_eq!(problem.code, "bad-config");
            assert!(problem.message.contains(reason), "{problem} lacks {reason}");
        }
    }
}
