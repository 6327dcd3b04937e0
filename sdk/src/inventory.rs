//! What there is on the node: pools of devices with attributes and capacities.

/// Value of an attribute, as in `resource.k8s.io/v1`. Made by `From` of what Rust has: integers of up to 32 bits and `i64`,
/// `bool`, strings, and vectors of them; versions by [`AttributeValue::version`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AttributeValue {
    /// A whole number.
    Int(i64),
    /// Yes or no.
    Bool(bool),
    /// Text of at most 64 bytes.
    Text(String),
    /// Semantic version 2.0.0 of at most 64 bytes.
    Version(String),
    /// Several whole numbers.
    Ints(Vec<i64>),
    /// Several times yes or no.
    Bools(Vec<bool>),
    /// Several texts of at most 64 bytes each.
    Texts(Vec<String>),
    /// Several versions of at most 64 bytes each.
    Versions(Vec<String>),
}

impl AttributeValue {
    /// A semantic version, which selectors compare as one: `AttributeValue::version("1.2.3")`.
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

/// A named fact about a device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Attribute {
    /// `name`, then it belongs to the driver's domain, or `domain/name`: a C identifier of at most 32 bytes after a DNS subdomain
    /// of at most 63.
    pub name: String,
    /// What it says.
    pub value: AttributeValue,
}

/// Which amounts of a shared device's capacity may be asked for. Amounts are quantities such as `80Gi`, `500m`, `4`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum CapacityChoice {
    /// Whatever fits.
    #[default]
    Any,
    /// One of these.
    Values(Vec<String>),
    /// An amount from `min` to `max`, in whole `step`s above `min`.
    Range {
        /// The least.
        min: String,
        /// The most; none means the capacity's value.
        max: Option<String>,
        /// None means any amount in between.
        step: Option<String>,
    },
}

/// How requests consume a capacity of a device that allows several allocations.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CapacityPolicy {
    /// What a request that names no amount consumes; none means all of it.
    pub default_amount: Option<String>,
    /// Which amounts may be asked for.
    pub choice: CapacityChoice,
}

/// A quantity that a device has.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Capacity {
    /// As for attributes.
    pub name: String,
    /// In Kubernetes' notation: `80Gi`, `500m`, `4`.
    pub value: String,
    /// Only for devices that allow several allocations.
    pub policy: Option<CapacityPolicy>,
}

impl Capacity {
    /// A capacity without a policy.
    pub fn new(name: impl Into<String>, value: impl Into<String>) -> Self {
        Capacity { name: name.into(), value: value.into(), policy: None }
    }

    /// The same with a policy, for a device that allows several allocations.
    #[must_use]
    pub fn policy(mut self, policy: CapacityPolicy) -> Self {
        self.policy = Some(policy);
        self
    }
}

/// A named amount: in a pool what there is, in a device what it takes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Counter {
    /// Unique in its set.
    pub name: String,
    /// In Kubernetes' notation.
    pub value: String,
}

/// Counters that belong together, such as the memory slices of one physical device.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CounterSet {
    /// Unique in its pool.
    pub name: String,
    /// The amounts.
    pub counters: Vec<Counter>,
}

impl CounterSet {
    /// An empty set.
    pub fn new(name: impl Into<String>) -> Self {
        CounterSet { name: name.into(), counters: Vec::new() }
    }

    /// The same with one counter more.
    #[must_use]
    pub fn counter(mut self, name: impl Into<String>, value: impl Into<String>) -> Self {
        self.counters.push(Counter { name: name.into(), value: value.into() });
        self
    }
}

/// What a taint does to those who do not tolerate it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum TaintEffect {
    /// Only says something.
    #[default]
    None,
    /// New claims do not get the device.
    NoSchedule,
    /// Pods that use the device are evicted as well.
    NoExecute,
}

/// Why a device should not be given to just anybody.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Taint {
    /// A label key, such as `example.com/overheated`.
    pub key: String,
    /// A label value, at most 63 bytes; may be empty.
    pub value: String,
    /// What it does.
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
    /// DNS label, at most 63 bytes, unique in its pool and stable over reboots (address, serial; never a device number).
    pub name: String,
    /// Attributes and capacities together: at most 32. A name occurs once.
    pub attributes: Vec<Attribute>,
    /// Amounts that it has.
    pub capacities: Vec<Capacity>,
    /// Why it should not be given to just anybody; at most 16.
    pub taints: Vec<Taint>,
    /// What it takes from the pool's shared counters.
    pub consumes: Vec<CounterSet>,
    /// Whether several claims may hold it at once, each with a share.
    pub allow_multiple_allocations: bool,
    /// Physical identity, such as `pci:0000:3b:00.0` or `dev:/dev/fuse`: at most 16 of at most 253 bytes. Two devices with a
    /// common identity, of whatever driver, are not handed out together.
    pub identity: Vec<String>,
    /// The NUMA nodes that it is near to.
    pub numa_nodes: Vec<u32>,
    /// Free facts for people and tools.
    pub annotations: Vec<(String, String)>,
}

impl Device {
    /// A device that has only a name; see [`dns_label`] for making one.
    pub fn new(name: impl Into<String>) -> Self {
        Device { name: name.into(), ..Self::default() }
    }

    /// The same with one attribute more.
    #[must_use]
    pub fn attribute(mut self, name: impl Into<String>, value: impl Into<AttributeValue>) -> Self {
        self.attributes.push(Attribute { name: name.into(), value: value.into() });
        self
    }

    /// The same with one attribute more, if there is a value.
    #[must_use]
    pub fn attribute_opt(self, name: impl Into<String>, value: Option<impl Into<AttributeValue>>) -> Self {
        match value {
            Some(value) => self.attribute(name, value),
            None => self,
        }
    }

    /// The same with one capacity more; `value` in Kubernetes' notation.
    #[must_use]
    pub fn capacity(self, name: impl Into<String>, value: impl Into<String>) -> Self {
        self.with_capacity(Capacity::new(name, value))
    }

    /// The same with one capacity more, which may have a policy.
    #[must_use]
    pub fn with_capacity(mut self, capacity: Capacity) -> Self {
        self.capacities.push(capacity);
        self
    }

    /// The same with one taint more.
    #[must_use]
    pub fn taint(mut self, key: impl Into<String>, value: impl Into<String>, effect: TaintEffect) -> Self {
        self.taints.push(Taint { key: key.into(), value: value.into(), effect });
        self
    }

    /// The same, taking this from the pool's shared counters.
    #[must_use]
    pub fn consumes(mut self, counters: CounterSet) -> Self {
        self.consumes.push(counters);
        self
    }

    /// Whether several claims may hold it at once.
    #[must_use]
    pub fn allow_multiple_allocations(mut self, allow: bool) -> Self {
        self.allow_multiple_allocations = allow;
        self
    }

    /// The same with one physical identity more.
    #[must_use]
    pub fn identity(mut self, identity: impl Into<String>) -> Self {
        self.identity.push(identity.into());
        self
    }

    /// The same, near to this NUMA node.
    #[must_use]
    pub fn numa_node(mut self, node: u32) -> Self {
        self.numa_nodes.push(node);
        self
    }

    /// The same with a free fact for people and tools.
    #[must_use]
    pub fn annotation(mut self, key: impl Into<String>, value: impl Into<String>) -> Self {
        self.annotations.push((key.into(), value.into()));
        self
    }

    /// The value of the attribute of this name.
    pub fn attribute_value(&self, name: &str) -> Option<&AttributeValue> {
        self.attributes.iter().find(|attribute| attribute.name == name).map(|attribute| &attribute.value)
    }
}

/// Devices that are published together.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Pool {
    /// DNS subdomain, at most 253 bytes, unique in the driver.
    pub name: String,
    /// Its devices.
    pub devices: Vec<Device>,
    /// What the devices share and take from.
    pub shared_counters: Vec<CounterSet>,
    /// Extended resource under which its devices are offered as well, such as `example.com/gpu`.
    pub extended_resource: Option<String>,
    /// Free facts for people and tools.
    pub annotations: Vec<(String, String)>,
}

impl Pool {
    /// An empty pool.
    pub fn new(name: impl Into<String>) -> Self {
        Pool { name: name.into(), ..Self::default() }
    }

    /// The same with one device more.
    #[must_use]
    pub fn device(mut self, device: Device) -> Self {
        self.devices.push(device);
        self
    }

    /// The same with more devices.
    #[must_use]
    pub fn devices(mut self, devices: impl IntoIterator<Item = Device>) -> Self {
        self.devices.extend(devices);
        self
    }

    /// The same with one set of counters more, which devices take from.
    #[must_use]
    pub fn shared_counters(mut self, counters: CounterSet) -> Self {
        self.shared_counters.push(counters);
        self
    }

    /// The same, offered under an extended resource as well.
    #[must_use]
    pub fn extended_resource(mut self, name: Option<String>) -> Self {
        self.extended_resource = name;
        self
    }

    /// The same with a free fact for people and tools.
    #[must_use]
    pub fn annotation(mut self, key: impl Into<String>, value: impl Into<String>) -> Self {
        self.annotations.push((key.into(), value.into()));
        self
    }
}

/// Everything that a driver has on this node now: at most 64 pools and 4,096 devices. What is not in it is gone.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Inventory {
    /// The pools.
    pub pools: Vec<Pool>,
}

impl Inventory {
    /// Nothing at all.
    pub fn new() -> Self {
        Self::default()
    }

    /// The same with one pool more.
    #[must_use]
    pub fn pool(mut self, pool: Pool) -> Self {
        self.pools.push(pool);
        self
    }

    /// The device of this name in the pool of that name.
    pub fn device(&self, pool: &str, device: &str) -> Option<&Device> {
        let pool = self.pools.iter().find(|candidate| candidate.name == pool)?;
        pool.devices.iter().find(|candidate| candidate.name == device)
    }
}

impl FromIterator<Pool> for Inventory {
    fn from_iter<I: IntoIterator<Item = Pool>>(pools: I) -> Self {
        Inventory { pools: pools.into_iter().collect() }
    }
}

const LABEL_BYTES_MAX: usize = 63;
const LABEL_HASH_BYTES: usize = 8;

/// A DNS label made from any text, for names of devices: lower case, every run of other characters than letters and digits one
/// dash, none at the ends. What is longer than 63 bytes is cut and ends in a hash of the text; a text without a letter or digit
/// gives its hash. The same text always gives the same label; two texts may give the same one.
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

/// Like [`dns_label`], ending in a hash of the text whether it is long or not: for a text whose plain label is taken.
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

/// FNV-1a, 32 bits, in hex: stable for ever, unlike what `std` hashes with.
fn hash(text: &str) -> String {
    let hash =
        text.bytes().fold(0x811c_9dc5_u32, |hash, byte| (hash ^ u32::from(byte)).wrapping_mul(0x0100_0193));
    format!("{hash:08x}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_take_the_kind_of_what_they_are_made_from() {
        assert_eq!(AttributeValue::from(7_u32), AttributeValue::Int(7));
        assert_eq!(AttributeValue::from(-1), AttributeValue::Int(-1));
        assert_eq!(AttributeValue::from(true), AttributeValue::Bool(true));
        assert_eq!(AttributeValue::from("a"), AttributeValue::Text("a".into()));
        assert_eq!(AttributeValue::from(vec!["a", "b"]), AttributeValue::Texts(vec!["a".into(), "b".into()]));
        assert_eq!(AttributeValue::version("1.0.0"), AttributeValue::Version("1.0.0".into()));
    }

    #[test]
    fn an_absent_value_adds_no_attribute() {
        let device = Device::new("a").attribute_opt("x", None::<i64>).attribute_opt("y", Some(1));
        assert_eq!(device.attribute_value("x"), None);
        assert_eq!(device.attribute_value("y"), Some(&AttributeValue::Int(1)));
    }

    #[test]
    fn labels_have_neither_dashes_at_the_ends_nor_runs_of_them() {
        assert_eq!(dns_label("/dev//net__tun-"), "dev-net-tun");
        assert_eq!(dns_label("ttyUSB0"), "ttyusb0");
    }

    #[test]
    fn a_text_without_letters_is_named_by_its_hash() {
        assert_eq!(dns_label("::").len(), 8);
        assert_ne!(dns_label("::"), dns_label(".."));
        assert_eq!(dns_label(""), "811c9dc5");
    }

    #[test]
    fn long_texts_that_begin_alike_get_different_labels() {
        let one = dns_label(&format!("{}1", "a".repeat(80)));
        let two = dns_label(&format!("{}2", "a".repeat(80)));
        assert_eq!((one.len(), two.len()), (63, 63));
        assert_ne!(one, two);
    }
}
