//! The traits that a driver implements.

use crate::{
    Additions, Claim, ClaimRecord, Context, DeviceHealth, DeviceReadings, DriverInfo, Host,
    Inventory, LeftOutDevice, Prepared, Problem, Trigger,
};

/// Outcomes of a batch by UID of the claim, in any order.
pub type Outcomes<T> = Vec<(String, Result<T, Problem>)>;

/// A device driver: plain functions from the host's arguments and readable files to inventories, edits and outcomes.
///
/// The functions have no `self`: an instance may live for a single call. State that must persist goes into the claim's memo. The
/// operator's config comes with the [`Context`].
///
/// The first page of this crate has a complete driver; this is one without devices to prepare:
///
/// ```
/// use nodedock_sdk::testing::Harness;
/// use nodedock_sdk::*;
///
/// struct Leds;
///
/// impl Driver for Leds {
///     fn describe() -> DriverInfo {
///         DriverInfo::new("leds.example.com", "0.1.0").sysfs_read(["class/leds"])
///     }
///     fn discover(host: &Host, _: &Context, _: &Trigger) -> Result<Inventory, Problem> {
///         let names = host.sysfs().read_dir("class/leds")?;
///         Ok(Inventory::new().pool(Pool::new("leds").devices(names.iter().map(|name| Device::new(dns_label(name))))))
///     }
///     fn prepare(_: &Host, _: &Context, claim: &Claim) -> Result<Prepared, Problem> {
///         Prepared::each(claim, |_| Err(Problem::unavailable("maintenance", "LEDs are not given out today")))
///     }
/// }
///
/// let node = Harness::<Leds>::new();
/// node.fake().dir("class/leds/input3::capslock");
/// assert!(node.discover()?.device("leds", "input3-capslock").is_some());
/// # Ok::<(), Problem>(())
/// ```
pub trait Driver {
    /// Returns the driver's identity and the capabilities that it requests. The host calls it without any grant; it must not need one.
    fn describe() -> DriverInfo;

    /// Returns the driver's devices on the node. The host calls it at load, on kernel events, on a timer and on request, and
    /// publishes changes.
    ///
    /// # Errors
    ///
    /// Any problem; the host then keeps the last inventory and shows the problem.
    fn discover(host: &Host, ctx: &Context, trigger: &Trigger) -> Result<Inventory, Problem>;

    /// Prepares the devices of a claim. The host may repeat it for a claim at any time, also after a crash in the middle, and the
    /// result must be the same.
    ///
    /// # Errors
    ///
    /// The problem that the host shows to the pod's owner; its kind decides whether the host retries.
    fn prepare(host: &Host, ctx: &Context, claim: &Claim) -> Result<Prepared, Problem>;

    /// Unprepares the devices of a claim. The host may repeat it; an unknown claim is a success. The default does nothing.
    ///
    /// # Errors
    ///
    /// The problem; the claim stays and the host retries.
    fn unprepare(host: &Host, ctx: &Context, claim: &ClaimRecord) -> Result<(), Problem> {
        let _ = (host, ctx, claim);
        Ok(())
    }

    /// Prepares several claims. The default calls [`prepare`](Driver::prepare) for one after the other.
    fn prepare_batch(host: &Host, ctx: &Context, claims: &[Claim]) -> Outcomes<Prepared> {
        claims
            .iter()
            .map(|claim| (claim.id.uid.clone(), Self::prepare(host, ctx, claim)))
            .collect()
    }

    /// Unprepares several claims. The default calls [`unprepare`](Driver::unprepare) for one after the other.
    fn unprepare_batch(host: &Host, ctx: &Context, claims: &[ClaimRecord]) -> Outcomes<()> {
        claims
            .iter()
            .map(|live| (live.claim.id.uid.clone(), Self::unprepare(host, ctx, live)))
            .collect()
    }
}

/// Optional: schemas and checks for configs and parameters. Name it in [`export_driver!`](crate::export_driver).
///
/// ```
/// use nodedock_sdk::*;
/// # struct Leds;
/// # impl Driver for Leds {
/// #     fn describe() -> DriverInfo { DriverInfo::new("leds.example.com", "0.1.0").sysfs_read(["class/leds/*"]) }
/// #     fn discover(_: &Host, _: &Context, _: &Trigger) -> Result<Inventory, Problem> {
/// #         Ok(Inventory::new().pool(Pool::new("leds").device(Device::new("a"))))
/// #     }
/// #     fn prepare(_: &Host, _: &Context, _: &Claim) -> Result<Prepared, Problem> { Ok(Prepared::new()) }
/// # }
///
/// impl Configuration for Leds {
///     fn parameters_schema() -> Option<String> {
///         Some(r#"{"type": "object", "properties": {"brightness": {"type": "integer", "minimum": 0, "maximum": 255}}}"#.into())
///     }
///     fn validate_parameters(parameters: &str) -> Result<(), Problem> {
///         let levels: std::collections::BTreeMap<String, u8> = parse_json("bad-parameters", "parameters", parameters)?;
///         match levels.get("brightness") {
///             Some(1..10) => Err(Problem::invalid("too-dark", "a brightness is 0, or 10 and more")),
///             _ => Ok(()),
///         }
///     }
/// }
/// assert_eq!(Leds::validate_parameters(r#"{"brightness": 5}"#).unwrap_err().code, "too-dark");
/// assert_eq!(Leds::validate_config("{}"), Ok(()));
/// ```
pub trait Configuration: Driver {
    /// Returns the JSON Schema of the operator's config, at most 256 KiB.
    fn config_schema() -> Option<String> {
        None
    }

    /// Returns the JSON Schema of the parameters in claims and classes, at most 256 KiB. The host refuses claims with parameters that do
    /// not fit it, before it calls the driver for them.
    fn parameters_schema() -> Option<String> {
        None
    }

    /// Checks what a schema cannot express in the operator's config (JSON); start with [`parse_json`](crate::parse_json).
    ///
    /// # Errors
    ///
    /// `invalid`, with the reason and the position.
    fn validate_config(config: &str) -> Result<(), Problem> {
        let _ = config;
        Ok(())
    }

    /// Checks what a schema cannot express in the parameters of a claim or class (JSON). The host calls it before the first
    /// [`prepare`](Driver::prepare) of a claim, for each entry of parameters that fits the schema.
    ///
    /// # Errors
    ///
    /// `invalid`, with the reason and the position.
    fn validate_parameters(parameters: &str) -> Result<(), Problem> {
        let _ = parameters;
        Ok(())
    }
}

/// Optional: the health of devices. The host calls it on a timer and on kernel events. Name it in [`export_driver!`](crate::export_driver).
///
/// ```
/// use nodedock_sdk::testing::Harness;
/// use nodedock_sdk::*;
/// # struct Leds;
/// # impl Driver for Leds {
/// #     fn describe() -> DriverInfo { DriverInfo::new("leds.example.com", "0.1.0").sysfs_read(["class/leds/*"]) }
/// #     fn discover(_: &Host, _: &Context, _: &Trigger) -> Result<Inventory, Problem> {
/// #         Ok(Inventory::new().pool(Pool::new("leds").device(Device::new("a"))))
/// #     }
/// #     fn prepare(_: &Host, _: &Context, _: &Claim) -> Result<Prepared, Problem> { Ok(Prepared::new()) }
/// # }
///
/// impl Health for Leds {
///     fn check(host: &Host, _: &Context) -> Result<Vec<DeviceHealth>, Problem> {
///         Ok(vec![match host.sysfs().find("class/leds/a")? {
///             Some(_) => DeviceHealth::healthy("leds", "a"),
///             None => DeviceHealth::unhealthy("leds", "a", "the LED is gone"),
///         }])
///     }
/// }
/// let node = Harness::<Leds>::new();
/// assert_eq!(node.check()?[0].state, HealthState::Unhealthy);
/// # Ok::<(), Problem>(())
/// ```
pub trait Health: Driver {
    /// Returns the health of devices. Devices that are not listed keep their health.
    ///
    /// # Errors
    ///
    /// Any problem; after a while the host sets the health of all devices to unknown.
    fn check(host: &Host, ctx: &Context) -> Result<Vec<DeviceHealth>, Problem>;
}

/// Optional: values of devices that change, for metrics and for people. The host reads them after each successful discovery. Name it in
/// [`export_driver!`](crate::export_driver).
///
/// ```
/// use nodedock_sdk::testing::Harness;
/// use nodedock_sdk::*;
/// # struct Leds;
/// # impl Driver for Leds {
/// #     fn describe() -> DriverInfo { DriverInfo::new("leds.example.com", "0.1.0").sysfs_read(["class/leds/*/brightness"]) }
/// #     fn discover(_: &Host, _: &Context, _: &Trigger) -> Result<Inventory, Problem> {
/// #         Ok(Inventory::new().pool(Pool::new("leds").device(Device::new("a"))))
/// #     }
/// #     fn prepare(_: &Host, _: &Context, _: &Claim) -> Result<Prepared, Problem> { Ok(Prepared::new()) }
/// # }
///
/// impl Telemetry for Leds {
///     fn read(host: &Host, _: &Context) -> Result<Vec<DeviceReadings>, Problem> {
///         let brightness: Option<u32> = host.sysfs().find_parsed("class/leds/a/brightness")?;
///         let readings = DeviceReadings::new("leds", "a");
///         Ok(vec![match brightness {
///             Some(value) => readings.reading("brightness_ratio", f64::from(value) / 255.0),
///             None => readings,
///         }])
///     }
/// }
/// let node = Harness::<Leds>::new();
/// node.fake().file("class/leds/a/brightness", "255\n");
/// assert_eq!(node.readings()?[0].readings[0].value, 1.0);
/// # Ok::<(), Problem>(())
/// ```
pub trait Telemetry: Driver {
    /// Returns the readings of devices. Devices that are not listed have none.
    ///
    /// # Errors
    ///
    /// Any problem; no device has readings then, and the host shows the problem.
    fn read(host: &Host, ctx: &Context) -> Result<Vec<DeviceReadings>, Problem>;
}

/// Optional: what the scheduler should know about devices beyond the inventory. Name it in [`export_driver!`](crate::export_driver).
///
/// ```
/// use nodedock_sdk::testing::Harness;
/// use nodedock_sdk::*;
/// # struct Leds;
/// # impl Driver for Leds {
/// #     fn describe() -> DriverInfo { DriverInfo::new("leds.example.com", "0.1.0").sysfs_read(["class/leds/*"]) }
/// #     fn discover(_: &Host, _: &Context, _: &Trigger) -> Result<Inventory, Problem> {
/// #         Ok(Inventory::new().pool(Pool::new("leds").device(Device::new("a"))))
/// #     }
/// #     fn prepare(_: &Host, _: &Context, _: &Claim) -> Result<Prepared, Problem> { Ok(Prepared::new()) }
/// # }
///
/// impl Scheduling for Leds {
///     fn schedule(_: &Host, _: &Context, inventory: &Inventory) -> Result<Additions, Problem> {
///         let here = |pool: &Pool, device: &Device| DeviceScheduling {
///             pool: pool.name.clone(),
///             device: device.name.clone(),
///             binds_to_node: true,
///             ..DeviceScheduling::default()
///         };
///         let devices = inventory.pools.iter().flat_map(|pool| pool.devices.iter().map(move |device| here(pool, device)));
///         Ok(Additions { devices: devices.collect(), ..Additions::default() })
///     }
/// }
/// assert!(Harness::<Leds>::new().schedule()?.devices[0].binds_to_node);
/// # Ok::<(), Problem>(())
/// ```
pub trait Scheduling: Driver {
    /// Returns what to add to an inventory that [`discover`](Driver::discover) has just returned.
    ///
    /// # Errors
    ///
    /// Any problem; the host then publishes nothing new, and shows the problem.
    fn schedule(host: &Host, ctx: &Context, inventory: &Inventory) -> Result<Additions, Problem>;
}

/// Optional: devices that the driver sees and does not offer, for people who would look for them in the inventory. Name it in
/// [`export_driver!`](crate::export_driver).
///
/// ```
/// use nodedock_sdk::testing::Harness;
/// use nodedock_sdk::*;
/// # struct Leds;
/// # impl Driver for Leds {
/// #     fn describe() -> DriverInfo { DriverInfo::new("leds.example.com", "0.1.0").sysfs_read(["class/leds/*/trigger"]) }
/// #     fn discover(_: &Host, _: &Context, _: &Trigger) -> Result<Inventory, Problem> {
/// #         Ok(Inventory::new().pool(Pool::new("leds").device(Device::new("b"))))
/// #     }
/// #     fn prepare(_: &Host, _: &Context, _: &Claim) -> Result<Prepared, Problem> { Ok(Prepared::new()) }
/// # }
///
/// impl LeftOut for Leds {
///     fn list_devices(host: &Host, _: &Context) -> Result<Vec<LeftOutDevice>, Problem> {
///         let trigger: Option<String> = host.sysfs().find("class/leds/a/trigger")?;
///         let is_used = trigger.is_some_and(|trigger| trigger.contains("[heartbeat]"));
///         Ok(is_used.then(|| LeftOutDevice::new("a", "the kernel shows its heartbeat with it")).into_iter().collect())
///     }
/// }
/// let node = Harness::<Leds>::new();
/// node.fake().file("class/leds/a/trigger", "none [heartbeat]\n");
/// assert_eq!(node.left_out()?[0].name, "a");
/// # Ok::<(), Problem>(())
/// ```
pub trait LeftOut: Driver {
    /// Returns the devices that the operator's config is for and that are not in the inventory. The host calls it after each successful
    /// [`discover`](Driver::discover), in the same instance, so that files in `/sys` read the same.
    ///
    /// # Errors
    ///
    /// Any problem; the host then keeps the last inventory and shows the problem, as for `discover`.
    fn list_devices(host: &Host, ctx: &Context) -> Result<Vec<LeftOutDevice>, Problem>;
}
