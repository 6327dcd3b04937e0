//! The driver's inventory: pools of devices with attributes and capacities.

/// The bound of text attributes (`wit/inventory.wit`).
const TEXT_BYTES_MAX: usize = 64;

/// Value of an attribute, as in `resource.k8s.io/v1`. `From` converts integers of up to 32 bits and `i64`, `bool`, strings, and
/// vectors of them; [`AttributeValue::version`] creates versions.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AttributeValue {
    /// An integer.
    Int(i64),
    /// A boolean.
    Bool(bool),
    /// Text of at most 64 bytes.
    Text(String),
    /// Semantic version 2.0.0 of at most 64 bytes.
    Version(String),
    /// A list of integers.
    Ints(Vec<i64>),
    /// A list of booleans.
    Bools(Vec<bool>),
    /// A list of texts of at most 64 bytes each.
    Texts(Vec<String>),
    /// A list of versions of at most 64 bytes each.
    Versions(Vec<String>),
}

impl AttributeValue {
    /// Creates a semantic version, which selectors compare by its parts: `AttributeValue::version("1.2.3")`.
    pub fn version(version: impl Into<String>) -> Self {
        AttributeValue::Version(version.into())
    }
}

macro_rules! attribute_from {
    ($($from:ty => |$value:ident| $made:expr;)*) => {
        $(impl From<$from> for AttributeValue {
            fn from($value: $from) -> Self {
                $made
            }
        })*
    };
}

attribute_from! {
    i64 => |value| AttributeValue::Int(value);
    i32 => |value| AttributeValue::Int(value.into());
    u32 => |value| AttributeValue::Int(value.into());
    u16 => |value| AttributeValue::Int(value.into());
    u8 => |value| AttributeValue::Int(value.into());
    bool => |value| AttributeValue::Bool(value);
    &str => |value| AttributeValue::Text(value.to_owned());
    String => |value| AttributeValue::Text(value);
    Vec<i64> => |value| AttributeValue::Ints(value);
    Vec<bool> => |value| AttributeValue::Bools(value);
    Vec<&str> => |value| AttributeValue::Texts(value.into_iter().map(str::to_owned).collect());
    Vec<String> => |value| AttributeValue::Texts(value);
}

/// A named attribute of a device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Attribute {
    /// `name`, in the driver's own domain, or `domain/name`: a C identifier of at most 32 bytes, after a DNS subdomain of at most 63
    /// bytes.
    pub name: String,
    /// Value of the attribute.
    pub value: AttributeValue,
}

/// Amounts of a shared device's capacity that a claim may request. Amounts are quantities such as `80Gi`, `500m`, `4`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum CapacityChoice {
    /// Any amount up to the capacity.
    #[default]
    Any,
    /// One of these: at most 10, ascending, with the default amount among them.
    Values(Vec<String>),
    /// An amount from `min` to `max`, in whole `step`s above `min`. The default amount is one.
    Range {
        /// The smallest amount.
        min: String,
        /// The largest amount; `None` means the capacity's value.
        max: Option<String>,
        /// `None` means any amount in between.
        step: Option<String>,
    },
}

/// Rules for requests of a capacity of a device that allows several allocations.
///
/// ```
/// use nodedock_sdk::testing::bounds;
/// use nodedock_sdk::{Capacity, CapacityChoice, CapacityPolicy, Device, Inventory, Pool};
///
/// // A claim gets 10Gi of the memory, or what it requests in steps of 5Gi.
/// let choice = CapacityChoice::Range { min: "5Gi".into(), max: None, step: Some("5Gi".into()) };
/// let policy = CapacityPolicy { default_amount: Some("10Gi".into()), choice };
/// let gpu = Device::new("gpu-0")
///     .allow_multiple_allocations(true)
///     .with_capacity(Capacity::new("memory", "80Gi").policy(policy));
/// let inventory = Inventory::new().pool(Pool::new("gpus").device(gpu));
/// assert!(bounds::inventory(&inventory).is_empty());
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CapacityPolicy {
    /// Amount that a request without one consumes; `None` means the whole capacity. Values and a range need it.
    pub default_amount: Option<String>,
    /// Amounts that a claim may request.
    pub choice: CapacityChoice,
}

/// A quantity that a device has.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Capacity {
    /// Name in the form of an attribute's name.
    pub name: String,
    /// Quantity in Kubernetes' notation: `80Gi`, `500m`, `4`.
    pub value: String,
    /// Only for devices that allow several allocations.
    pub policy: Option<CapacityPolicy>,
}

impl Capacity {
    /// Creates a capacity without a policy.
    pub fn new(name: impl Into<String>, value: impl Into<String>) -> Self {
        Capacity {
            name: name.into(),
            value: value.into(),
            policy: None,
        }
    }

    /// Sets a policy, for a device that allows several allocations.
    #[must_use]
    pub fn policy(mut self, policy: CapacityPolicy) -> Self {
        self.policy = Some(policy);
        self
    }
}

/// A named amount: in a pool the available amount, in a device the amount that it consumes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Counter {
    /// Unique in its set.
    pub name: String,
    /// Quantity in Kubernetes' notation.
    pub value: String,
}

/// Counters that belong together, such as the memory slices of one physical device.
///
/// ```
/// use nodedock_sdk::testing::bounds;
/// use nodedock_sdk::{CounterSet, Device, Inventory, Pool};
///
/// // The GPU as a whole, or its two halves: a claim of one leaves no slices for the other.
/// let slices = |count: &str| CounterSet::new("gpu-0").counter("slices", count);
/// let halves = ["gpu-0-a", "gpu-0-b"].map(|name| Device::new(name).consumes(slices("4")));
/// let pool = Pool::new("gpus")
///     .shared_counters(slices("8"))
///     .device(Device::new("gpu-0").consumes(slices("8")))
///     .devices(halves);
/// assert!(bounds::inventory(&Inventory::new().pool(pool)).is_empty());
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CounterSet {
    /// Unique in its pool.
    pub name: String,
    /// The counters of the set: 1 to 32.
    pub counters: Vec<Counter>,
}

impl CounterSet {
    /// Creates an empty set.
    pub fn new(name: impl Into<String>) -> Self {
        CounterSet {
            name: name.into(),
            counters: Vec::new(),
        }
    }

    /// Adds a counter.
    #[must_use]
    pub fn counter(mut self, name: impl Into<String>, value: impl Into<String>) -> Self {
        self.counters.push(Counter {
            name: name.into(),
            value: value.into(),
        });
        self
    }
}

/// Effect of a taint on claims and pods that do not tolerate it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum TaintEffect {
    /// Informational only.
    #[default]
    None,
    /// New claims do not get the device.
    NoSchedule,
    /// Pods that use the device are evicted as well.
    NoExecute,
}

/// A taint: a reason not to allocate a device, unless the claim tolerates it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Taint {
    /// A label key, such as `example.com/overheated`.
    pub key: String,
    /// A label value, at most 63 bytes; may be empty.
    pub value: String,
    /// Effect of the taint.
    pub effect: TaintEffect,
}

/// One allocatable device.
///
/// ```
/// use nodedock_sdk::{AttributeValue, Device};
///
/// let device = Device::new("gpu-0")
///     .attribute("model", "Z100")
///     .attribute("index", 0)
///     .attribute("firmware", AttributeValue::version("1.4.0"))
///     .capacity("memory", "80Gi")
///     .identity("pci:0000:3b:00.0")
///     .numa_node(0);
/// assert_eq!(device.attributes.len(), 3);
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Device {
    /// DNS label, at most 63 bytes, unique in its pool and stable across reboots (address, serial; never a device number, nor another number
    /// that the kernel counts, such as those of `ttyS0`, of a USB bus or of `xhci-hcd.1`).
    pub name: String,
    /// Attributes and capacities together: at most 32. A name occurs once.
    pub attributes: Vec<Attribute>,
    /// Capacities of the device.
    pub capacities: Vec<Capacity>,
    /// Taints of the device; at most 16.
    pub taints: Vec<Taint>,
    /// Amounts that it consumes of the pool's shared counters.
    pub consumes: Vec<CounterSet>,
    /// True if several claims may use it at once, each with a share.
    pub allow_multiple_allocations: bool,
    /// Physical identity, such as `pci:0000:3b:00.0` or `dev:/dev/fuse`: at most 16 of at most 253 bytes each. The host does not
    /// prepare two devices with a common identity at the same time, even if they belong to different drivers.
    pub identity: Vec<String>,
    /// NUMA nodes that are local to the device.
    pub numa_nodes: Vec<u32>,
    /// Annotations for people and tools.
    pub annotations: Vec<(String, String)>,
}

impl Device {
    /// Creates a device with a name; [`dns_label`] converts a text to a valid name.
    pub fn new(name: impl Into<String>) -> Self {
        Device {
            name: name.into(),
            ..Self::default()
        }
    }

    /// Adds an attribute.
    #[must_use]
    pub fn attribute(mut self, name: impl Into<String>, value: impl Into<AttributeValue>) -> Self {
        self.attributes.push(Attribute {
            name: name.into(),
            value: value.into(),
        });
        self
    }

    /// Adds an attribute if there is a value.
    #[must_use]
    pub fn attribute_opt(
        self,
        name: impl Into<String>,
        value: Option<impl Into<AttributeValue>>,
    ) -> Self {
        match value {
            Some(value) => self.attribute(name, value),
            None => self,
        }
    }

    /// Adds text attributes, without those of more than 64 bytes: the beginning of an address or a serial number may be that of another device.
    ///
    /// ```
    /// use nodedock_sdk::Device;
    ///
    /// let device = Device::new("d").texts([("serial", "A5".to_owned()), ("path", "x".repeat(65))]);
    /// assert_eq!(device.attributes.len(), 1);
    /// ```
    #[must_use]
    pub fn texts<N: Into<String>>(self, texts: impl IntoIterator<Item = (N, String)>) -> Self {
        let texts = texts.into_iter();
        texts
            .filter(|(_, text)| text.len() <= TEXT_BYTES_MAX)
            .fold(self, |device, (name, text)| device.attribute(name, text))
    }

    /// Adds a capacity; `value` in Kubernetes' notation.
    #[must_use]
    pub fn capacity(self, name: impl Into<String>, value: impl Into<String>) -> Self {
        self.with_capacity(Capacity::new(name, value))
    }

    /// Adds a capacity, which may have a policy.
    #[must_use]
    pub fn with_capacity(mut self, capacity: Capacity) -> Self {
        self.capacities.push(capacity);
        self
    }

    /// Adds a taint.
    ///
    /// ```
    /// use nodedock_sdk::{Device, TaintEffect};
    ///
    /// let gpu = Device::new("gpu-0").taint("gpu.example.com/overheated", "", TaintEffect::NoSchedule);
    /// assert_eq!(gpu.taints[0].key, "gpu.example.com/overheated");
    /// ```
    #[must_use]
    pub fn taint(
        mut self,
        key: impl Into<String>,
        value: impl Into<String>,
        effect: TaintEffect,
    ) -> Self {
        self.taints.push(Taint {
            key: key.into(),
            value: value.into(),
            effect,
        });
        self
    }

    /// Adds consumption of the pool's shared counters.
    #[must_use]
    pub fn consumes(mut self, counters: CounterSet) -> Self {
        self.consumes.push(counters);
        self
    }

    /// Sets whether several claims may use it at once.
    #[must_use]
    pub fn allow_multiple_allocations(mut self, allow: bool) -> Self {
        self.allow_multiple_allocations = allow;
        self
    }

    /// Adds a physical identity.
    #[must_use]
    pub fn identity(mut self, identity: impl Into<String>) -> Self {
        self.identity.push(identity.into());
        self
    }

    /// Adds a local NUMA node.
    #[must_use]
    pub fn numa_node(mut self, node: u32) -> Self {
        self.numa_nodes.push(node);
        self
    }

    /// Adds an annotation for people and tools: `nodedock explain device` shows it, and `get devices -o json`.
    #[must_use]
    pub fn annotation(mut self, key: impl Into<String>, value: impl Into<String>) -> Self {
        self.annotations.push((key.into(), value.into()));
        self
    }

    /// Returns the value of the attribute of this name.
    pub fn attribute_value(&self, name: &str) -> Option<&AttributeValue> {
        self.attributes
            .iter()
            .find(|attribute| attribute.name == name)
            .map(|attribute| &attribute.value)
    }
}

/// Devices that are published together.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Pool {
    /// DNS subdomain, at most 253 bytes, unique in the driver.
    pub name: String,
    /// Its devices.
    pub devices: Vec<Device>,
    /// Counters that the devices share and consume.
    pub shared_counters: Vec<CounterSet>,
    /// Extended resource that also offers its devices, such as `example.com/gpu`.
    pub extended_resource: Option<String>,
    /// Annotations for people and tools.
    pub annotations: Vec<(String, String)>,
}

impl Pool {
    /// Creates an empty pool.
    pub fn new(name: impl Into<String>) -> Self {
        Pool {
            name: name.into(),
            ..Self::default()
        }
    }

    /// Adds a device.
    #[must_use]
    pub fn device(mut self, device: Device) -> Self {
        self.devices.push(device);
        self
    }

    /// Adds devices.
    #[must_use]
    pub fn devices(mut self, devices: impl IntoIterator<Item = Device>) -> Self {
        self.devices.extend(devices);
        self
    }

    /// Adds a set of shared counters.
    #[must_use]
    pub fn shared_counters(mut self, counters: CounterSet) -> Self {
        self.shared_counters.push(counters);
        self
    }

    /// Sets the extended resource that also offers the devices.
    ///
    /// ```
    /// use nodedock_sdk::{Device, Pool};
    ///
    /// // A container gets one of them by `limits: {example.com/gpu: 1}`, without a claim of its own.
    /// let pool = Pool::new("gpus").device(Device::new("gpu-0")).extended_resource(Some("example.com/gpu".into()));
    /// assert_eq!(pool.extended_resource.as_deref(), Some("example.com/gpu"));
    /// ```
    #[must_use]
    pub fn extended_resource(mut self, name: Option<String>) -> Self {
        self.extended_resource = name;
        self
    }

    /// Names the device nodes without hardware that devices of several drivers share by design, as globs of paths below `/dev`. The host keeps
    /// what a container gets in one claim; these nodes are in none.
    ///
    /// ```
    /// use nodedock_sdk::{Device, Pool};
    ///
    /// let pool = Pool::new("functions").device(Device::new("0000-3b-00-0")).control_nodes(["/dev/vfio/vfio"]);
    /// assert_eq!(pool.annotations, [("nodedock.dev/control-nodes".to_owned(), "/dev/vfio/vfio".to_owned())]);
    /// ```
    #[must_use]
    pub fn control_nodes<'a>(self, globs: impl IntoIterator<Item = &'a str>) -> Self {
        let globs: Vec<_> = globs.into_iter().collect();
        self.annotation("nodedock.dev/control-nodes", globs.join(" "))
    }

    /// Adds an annotation for people and tools, shown with each device of the pool. One of the device with the same key takes precedence.
    #[must_use]
    pub fn annotation(mut self, key: impl Into<String>, value: impl Into<String>) -> Self {
        self.annotations.push((key.into(), value.into()));
        self
    }
}

/// Every device that a driver has on this node now: at most 64 pools and 4,096 devices. A device that is not listed is gone.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Inventory {
    /// The pools.
    pub pools: Vec<Pool>,
}

impl Inventory {
    /// Creates an empty inventory.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a pool.
    #[must_use]
    pub fn pool(mut self, pool: Pool) -> Self {
        self.pools.push(pool);
        self
    }

    /// Returns the device of this name in the pool of that name.
    pub fn device(&self, pool: &str, device: &str) -> Option<&Device> {
        let pool = self.pools.iter().find(|candidate| candidate.name == pool)?;
        pool.devices
            .iter()
            .find(|candidate| candidate.name == device)
    }
}

impl FromIterator<Pool> for Inventory {
    fn from_iter<I: IntoIterator<Item = Pool>>(pools: I) -> Self {
        Inventory {
            pools: pools.into_iter().collect(),
        }
    }
}

const LABEL_BYTES_MAX: usize = 63;
const LABEL_HASH_BYTES: usize = 8;

/// Converts any text to a DNS label, for names of devices: lower case, with one dash for every run of characters other than letters
/// and digits, and no dash at the ends. A label of more than 63 bytes is truncated and ends in a hash of the text; a text without a
/// letter or digit becomes its hash. The same text always has the same label; two texts may have the same one.
///
/// ```
/// use nodedock_sdk::dns_label;
///
/// assert_eq!(dns_label("net/tun"), "net-tun");
/// assert_eq!(dns_label("0000:3B:00.0"), "0000-3b-00-0");
/// assert_eq!(dns_label(&"x".repeat(100)).len(), 63);
/// ```
pub fn dns_label(text: &str) -> String {
    let mut label = String::with_capacity(text.len());
    for character in text.chars() {
        match character.to_ascii_lowercase() {
            kept @ ('a'..='z' | '0'..='9') => label.push(kept),
            _ if label.is_empty() || label.ends_with('-') => {}
            _ => label.push('-'),
        }
    }
    label.truncate(label.trim_end_matches('-').len());
    if label.is_empty() {
        return hash(text);
    }
    if label.len() > LABEL_BYTES_MAX {
        label.truncate(LABEL_BYTES_MAX - LABEL_HASH_BYTES - 1);
        label.truncate(label.trim_end_matches('-').len());
        label = format!("{label}-{}", hash(text));
    }
    label
}

/// Returns a label as [`dns_label`] does, but always ending in a hash of the text: for a text whose plain label is in use.
///
/// ```
/// use nodedock_sdk::dns_label_hashed;
///
/// assert_eq!(dns_label_hashed("ttyS0"), "ttys0-6aed0f3f");
/// assert_ne!(dns_label_hashed("ttyS0"), dns_label_hashed("ttys0"));
/// ```
pub fn dns_label_hashed(text: &str) -> String {
    let mut label = dns_label(text);
    label.truncate(LABEL_BYTES_MAX - LABEL_HASH_BYTES - 1);
    format!("{}-{}", label.trim_end_matches('-'), hash(text))
}

/// FNV-1a, 32 bits, in hex: stable forever, unlike the hashers of `std`.
fn hash(text: &str) -> String {
    let hash = text.bytes().fold(0x811c_9dc5_u32, |hash, byte| {
        (hash ^ u32::from(byte)).wrapping_mul(0x0100_0193)
    });
    format!("{hash:08x}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn attribute_kind_follows_the_rust_type() {
        assert_eq!(AttributeValue::from(7_u32), AttributeValue::Int(7));
        assert_eq!(AttributeValue::from(-1), AttributeValue::Int(-1));
        assert_eq!(AttributeValue::from(true), AttributeValue::Bool(true));
        assert_eq!(AttributeValue::from("a"), AttributeValue::Text("a".into()));
        assert_eq!(
            AttributeValue::from(vec!["a", "b"]),
            AttributeValue::Texts(vec!["a".into(), "b".into()])
        );
        assert_eq!(
            AttributeValue::version("1.0.0"),
            AttributeValue::Version("1.0.0".into())
        );
    }

    #[test]
    fn an_absent_value_adds_no_attribute() {
        let device = Device::new("a")
            .attribute_opt("x", None::<i64>)
            .attribute_opt("y", Some(1));
        assert_eq!(device.attribute_value("x"), None);
        assert_eq!(device.attribute_value("y"), Some(&AttributeValue::Int(1)));
    }

    #[test]
    fn labels_have_only_single_inner_dashes() {
        assert_eq!(dns_label("/dev//net__tun-"), "dev-net-tun");
        assert_eq!(dns_label("ttyUSB0"), "ttyusb0");
    }

    #[test]
    fn text_without_letters_becomes_hash() {
        assert_eq!(dns_label("::").len(), 8);
        assert_ne!(dns_label("::"), dns_label(".."));
        assert_eq!(dns_label(""), "811c9dc5");
    }

    #[test]
    fn long_texts_get_different_labels() {
        let one = dns_label(&format!("{}1", "a".repeat(80)));
        let two = dns_label(&format!("{}2", "a".repeat(80)));
        assert_eq!((one.len(), two.len()), (63, 63));
        assert_ne!(one, two);
    }
}
