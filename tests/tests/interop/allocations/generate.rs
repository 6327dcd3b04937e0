//! Random inventories and claims from a seed. The same seed has the same ones forever: the generator is its own.

use serde_json::{Map, Value, json};

pub(crate) const NODE: &str = "node-1";
pub(crate) const DRIVERS: [&str; 3] = ["gpu.example.com", "mem.example.com", "nic.example.com"];
const ROOTS: [&str; 3] = ["root-0", "root-1", "root-2"];

/// SplitMix64.
pub(crate) struct Random(u64);

impl Random {
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed)
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Returns a number below `end`.
    pub(crate) fn below(&mut self, end: usize) -> usize {
        usize::try_from(self.next() % u64::try_from(end.max(1)).expect("64 bits"))
            .expect("below a usize")
    }

    pub(crate) fn percent(&mut self, percent: usize) -> bool {
        self.below(100) < percent
    }

    fn driver(&mut self) -> &'static str {
        DRIVERS[self.below(DRIVERS.len())]
    }

    pub(crate) fn of<'a, T>(&mut self, list: &'a [T]) -> &'a T {
        &list[self.below(list.len())]
    }
}

pub(crate) fn node() -> Value {
    json!({"metadata": {"name": NODE, "labels": {"zone": "a", "cores": "8"}}})
}

/// Constraints on generated selectors and classes.
pub(crate) struct Profile {
    /// True if selectors that fail on some devices are among them.
    failing: bool,
    /// True if devices are shared or partitioned, false if all are plain.
    advanced: bool,
}

pub(crate) fn profile(random: &mut Random) -> Profile {
    Profile {
        failing: random.percent(30),
        advanced: random.percent(80),
    }
}

pub(crate) fn slices(random: &mut Random, profile: &Profile) -> Vec<Value> {
    let mut slices = Vec::new();
    let broken = random.percent(10);
    for driver in DRIVERS {
        for pool in 0..1 + random.below(2) {
            add_pool(
                random,
                profile,
                driver,
                &format!("pool-{pool}"),
                broken,
                &mut slices,
            );
        }
    }
    slices
}

fn add_pool(
    random: &mut Random,
    profile: &Profile,
    driver: &str,
    pool: &str,
    broken: bool,
    slices: &mut Vec<Value>,
) {
    let counters = profile.advanced && random.percent(50);
    let device_slices = 1 + random.below(3);
    let count = device_slices + usize::from(counters) + usize::from(broken && random.percent(20));
    let generation = 1 + random.below(3);
    let old = generation > 1 && random.percent(30);
    let reach = random.below(5);
    let mut device = 0;
    for number in 0..device_slices {
        let mut spec = spec(driver, pool, generation, count);
        let mut devices = Vec::new();
        for _ in 0..random.below(7) {
            let name = if broken && random.percent(5) {
                "device-0".to_owned()
            } else {
                format!("device-{device}")
            };
            let mut made = self::device(random, profile, driver, &name, device, counters);
            if reach == 4 {
                extend(&mut made, device_reach(random));
            }
            devices.push(made);
            device += 1;
        }
        spec.insert("devices".into(), devices.into());
        let reach = match (reach, random.below(8)) {
            (4, _) => json!({"perDeviceNodeSelection": true}),
            (3, 0) => json!({"nodeName": "node-2"}),
            (2 | 3, _) => json!({"nodeSelector": node_selector(random)}),
            (1, _) => json!({"allNodes": true}),
            _ => json!({"nodeName": NODE}),
        };
        let mut spec = Value::Object(spec);
        extend(&mut spec, reach);
        let order = random.below(1_000);
        slices.push(slice(&format!("{order}-{driver}-{pool}-{number}"), spec));
    }
    if counters {
        let mut spec = Value::Object(spec(driver, pool, generation, count));
        let sets: Vec<Value> = ["set-0", "set-1"]
            .iter()
            .map(|set| {
                json!({"name": set, "counters": {
                    "units": {"value": (2 + random.below(6)).to_string()},
                    "memory": {"value": format!("{}Gi", 8 + random.below(5) * 8)},
                }})
            })
            .collect();
        extend(&mut spec, json!({"sharedCounters": sets, "allNodes": true}));
        slices.push(slice(&format!("counters-{driver}-{pool}"), spec));
    }
    if old {
        // One slice of two: the official allocator uses a complete older generation if none of the newer one is for the node.
        let mut spec = spec(driver, pool, generation - 1, 2);
        spec.insert("nodeName".into(), NODE.into());
        spec.insert(
            "devices".into(),
            vec![self::device(random, profile, driver, "old", 99, false)].into(),
        );
        slices.push(slice(&format!("old-{driver}-{pool}"), Value::Object(spec)));
    }
}

fn slice(name: &str, spec: Value) -> Value {
    json!({"metadata": {"name": name}, "spec": spec})
}

fn spec(driver: &str, pool: &str, generation: usize, count: usize) -> Map<String, Value> {
    let pool = json!({"name": pool, "generation": generation, "resourceSliceCount": count});
    Map::from_iter([
        ("driver".to_owned(), driver.into()),
        ("pool".to_owned(), pool),
    ])
}

fn extend(object: &mut Value, with: Value) {
    let (Value::Object(object), Value::Object(with)) = (object, with) else {
        panic!("two objects")
    };
    object.extend(with);
}

fn device_reach(random: &mut Random) -> Value {
    match random.below(5) {
        0 => json!({"nodeName": "node-2"}),
        1 => json!({"nodeSelector": node_selector(random)}),
        2 => json!({"allNodes": true}),
        _ => json!({"nodeName": NODE}),
    }
}

fn node_selector(random: &mut Random) -> Value {
    let requirements = [
        json!({"key": "zone", "operator": "In", "values": ["a", "b"]}),
        json!({"key": "zone", "operator": "In", "values": ["b", "a"]}),
        json!({"key": "zone", "operator": "Exists"}),
        json!({"key": "cores", "operator": "Gt", "values": ["4"]}),
        json!({"key": "rack", "operator": "DoesNotExist"}),
        json!({"key": "zone", "operator": "NotIn", "values": ["a"]}),
    ];
    let last = if random.percent(15) {
        requirements.len()
    } else {
        requirements.len() - 1
    };
    let requirement = requirements[random.below(last)].clone();
    json!({"nodeSelectorTerms": [{"matchExpressions": [requirement]}]})
}

fn device(
    random: &mut Random,
    profile: &Profile,
    driver: &str,
    name: &str,
    number: usize,
    counters: bool,
) -> Value {
    let mut device = json!({"name": name, "attributes": attributes(random, profile, number)});
    if random.percent(70) {
        let capacity = capacities(random, profile);
        extend(&mut device, json!({"capacity": capacity}));
    }
    let shareable = if driver == DRIVERS[1] { 75 } else { 10 };
    if profile.advanced && random.percent(shareable) {
        extend(&mut device, json!({"allowMultipleAllocations": true}));
    }
    if counters && random.percent(80) {
        let mut consumes = vec![consumption(random, "set-0")];
        if random.percent(30) {
            consumes.push(consumption(random, "set-1"));
        }
        extend(&mut device, json!({"consumesCounters": consumes}));
    }
    if random.percent(15) {
        let taints: Vec<Value> = (0..=random.below(2)).map(|_| taint(random)).collect();
        extend(&mut device, json!({"taints": taints}));
    }
    if profile.advanced && random.percent(5) {
        extend(
            &mut device,
            json!({"bindingConditions": ["attached"], "bindingFailureConditions": ["failed"], "bindsToNode": random.percent(50)}),
        );
    }
    device
}

fn attributes(random: &mut Random, profile: &Profile, number: usize) -> Value {
    let mut attributes = json!({
        "index": {"int": number},
        "model": {"string": random.of(&["a", "b"])},
        "example.com/socket": {"int": random.below(2)},
    });
    if !profile.failing || random.percent(85) {
        extend(
            &mut attributes,
            json!({"healthy": {"bool": random.percent(80)}}),
        );
    }
    if random.percent(70) {
        extend(
            &mut attributes,
            json!({"firmware": {"version": random.of(&["1.0.0", "1.2.0", "2.0.0"])}}),
        );
    }
    if random.percent(70) {
        let roots: Vec<&str> = ROOTS.into_iter().filter(|_| random.percent(40)).collect();
        let roots = match roots.as_slice() {
            [] => json!({"string": ROOTS[0]}),
            roots => json!({"strings": roots}),
        };
        extend(&mut attributes, json!({"example.com/root": roots}));
    }
    attributes
}

fn capacities(random: &mut Random, profile: &Profile) -> Value {
    let mut memory = json!({"value": random.of(&["8Gi", "16Gi", "40Gi"])});
    let policy = match random.below(6) {
        0 => json!({"default": "1Gi", "validRange": {"min": "1Gi", "max": "12Gi", "step": "2Gi"}}),
        1 => json!({"default": "2Gi", "validValues": ["2Gi", "4Gi", "10Gi"]}),
        2 => json!({"default": "3Gi"}),
        3 => json!({"default": "2Gi", "validRange": {"min": "2Gi"}}),
        _ => Value::Null,
    };
    if profile.advanced && !policy.is_null() {
        extend(&mut memory, json!({"requestPolicy": policy}));
    }
    let mut capacities = json!({"memory": memory});
    if random.percent(30) {
        let mut cores = json!({"value": random.of(&["2", "4"])});
        if profile.advanced && random.percent(60) {
            let range = json!({"min": "250m", "max": "3", "step": "250m"});
            extend(
                &mut cores,
                json!({"requestPolicy": {"default": "500m", "validRange": range}}),
            );
        }
        extend(&mut capacities, json!({"example.com/cores": cores}));
    }
    capacities
}

fn consumption(random: &mut Random, set: &str) -> Value {
    let mut counters = json!({"units": {"value": (1 + random.below(3)).to_string()}});
    if random.percent(50) {
        extend(
            &mut counters,
            json!({"memory": {"value": random.of(&["4Gi", "8192Mi", "12Gi"])}}),
        );
    }
    json!({"counterSet": set, "counters": counters})
}

fn taint(random: &mut Random) -> Value {
    json!({
        "key": random.of(&["example.com/broken", "example.com/reserved"]),
        "value": random.of(&["", "yes"]),
        "effect": random.of(&["NoSchedule", "NoSchedule", "NoExecute", "None"]),
        "timeAdded": "2026-01-01T00:00:00Z",
    })
}

pub(crate) fn classes(random: &mut Random) -> Vec<Value> {
    let mut classes: Vec<Value> = DRIVERS
        .iter()
        .map(|driver| {
            let selectors =
                json!([{"cel": {"expression": format!("device.driver == {driver:?}")}}]);
            let mut spec = json!({"selectors": selectors});
            if random.percent(50) {
                let config: Vec<Value> = (0..=random.below(2))
                    .map(|number| opaque(driver, number))
                    .collect();
                extend(&mut spec, json!({"config": config}));
            }
            json!({"metadata": {"name": driver}, "spec": spec})
        })
        .collect();
    classes.push(json!({"metadata": {"name": "any"}, "spec": {}}));
    classes
}

fn opaque(driver: &str, number: usize) -> Value {
    json!({"opaque": {"driver": driver, "parameters": {"number": number}}})
}

pub(crate) fn claim(random: &mut Random, profile: &Profile) -> Value {
    let mut names = Vec::new();
    let many = if random.percent(5) { 7 } else { 3 };
    let requests: Vec<Value> = (0..1 + random.below(many))
        .map(|number| request(random, profile, &format!("r{number}"), &mut names))
        .collect();
    let mut devices = json!({"requests": requests});
    if random.percent(40) {
        let constraints: Vec<Value> = (0..=random.below(2))
            .map(|_| constraint(random, &names))
            .collect();
        extend(&mut devices, json!({"constraints": constraints}));
    }
    if random.percent(30) {
        let config: Vec<Value> = (0..=random.below(3))
            .map(|number| {
                let mut config = opaque(random.driver(), number);
                extend(&mut config, json!({"requests": some_of(random, &names)}));
                config
            })
            .collect();
        extend(&mut devices, json!({"config": config}));
    }
    json!({"metadata": {"name": "claim", "namespace": "default"}, "spec": {"devices": devices}})
}

fn some_of(random: &mut Random, names: &[String]) -> Vec<String> {
    if random.percent(40) {
        return Vec::new();
    }
    names
        .iter()
        .filter(|_| random.percent(60))
        .cloned()
        .collect()
}

fn constraint(random: &mut Random, names: &[String]) -> Value {
    let attribute = *random.of(&[
        "example.com/socket",
        "example.com/root",
        "example.com/root",
        "gpu.example.com/model",
        "gpu.example.com/index",
        "mem.example.com/firmware",
    ]);
    let kind = random.of(&["matchAttribute", "matchAttribute", "distinctAttribute"]);
    json!({*kind: attribute, "requests": some_of(random, names)})
}

fn request(random: &mut Random, profile: &Profile, name: &str, names: &mut Vec<String>) -> Value {
    names.push(name.to_owned());
    if random.percent(75) {
        let mut exactly = asked(random, profile);
        if random.percent(3) {
            extend(&mut exactly, json!({"adminAccess": true}));
        }
        return json!({"name": name, "exactly": exactly});
    }
    let sub_requests: Vec<Value> = (0..=random.below(3))
        .map(|number| {
            let sub_name = format!("s{number}");
            names.push(format!("{name}/{sub_name}"));
            let mut asked = asked(random, profile);
            extend(&mut asked, json!({"name": sub_name}));
            asked
        })
        .collect();
    json!({"name": name, "firstAvailable": sub_requests})
}

fn asked(random: &mut Random, profile: &Profile) -> Value {
    let driver = random.driver();
    let class = if random.percent(8) { "any" } else { driver };
    let mut asked = json!({"deviceClassName": class, "allocationMode": "ExactCount", "count": 1});
    if random.percent(30) {
        let count = if random.percent(4) {
            20
        } else {
            1 + random.below(4)
        };
        extend(&mut asked, json!({"count": count}));
    }
    if random.percent(10) {
        asked.as_object_mut().expect("an object").remove("count");
        extend(&mut asked, json!({"allocationMode": "All"}));
    }
    if random.percent(35) {
        let selectors: Vec<Value> = (0..=random.below(2))
            .map(|_| json!({"cel": {"expression": selector(random, profile, driver)}}))
            .collect();
        extend(&mut asked, json!({"selectors": selectors}));
    }
    if random.percent(25) {
        let tolerations: Vec<Value> = (0..=random.below(2)).map(|_| toleration(random)).collect();
        extend(&mut asked, json!({"tolerations": tolerations}));
    }
    if profile.advanced && random.percent(25) {
        let mut requests = json!({"memory": random.of(&["1Gi", "3Gi", "3000Mi", "9Gi", "20Gi"])});
        if random.percent(20) {
            extend(
                &mut requests,
                json!({"example.com/cores": random.of(&["100m", "1", "1100m", "100u"])}),
            );
        }
        extend(&mut asked, json!({"capacity": {"requests": requests}}));
    }
    asked
}

fn selector(random: &mut Random, profile: &Profile, driver: &str) -> String {
    let attributes = format!("device.attributes[{driver:?}]");
    let shared = "device.attributes[\"example.com\"]";
    let last = if profile.failing { 10 } else { 7 };
    match random.below(last) {
        0 => format!("{attributes}.model == {:?}", random.of(&["a", "b"])),
        1 => format!("{shared}.socket == {}", random.below(2)),
        2 => format!(
            "{attributes}.index < {} || {attributes}.model in [\"a\"]",
            random.below(5)
        ),
        3 => format!("has({attributes}.healthy) && {attributes}.healthy"),
        4 => format!(
            "has({shared}.root) && {shared}.root.includes({:?})",
            random.of(&ROOTS)
        ),
        5 => format!("device.allowMultipleAllocations == {}", random.percent(50)),
        6 => {
            let memory = format!("device.capacity[{driver:?}].memory");
            format!("!has({memory}) || {memory}.compareTo(quantity(\"10Gi\")) >= 0")
        }
        7 => format!("{attributes}.firmware.isGreaterThan(semver(\"1.1.0\"))"),
        8 => format!("device.capacity[{driver:?}].memory.isLessThan(quantity(\"20Gi\"))"),
        _ => format!("{attributes}.healthy == true"),
    }
}

fn toleration(random: &mut Random) -> Value {
    match random.below(4) {
        0 => json!({"operator": "Exists"}),
        1 => json!({"operator": "Exists", "key": "example.com/broken", "effect": "NoSchedule"}),
        2 => {
            json!({"operator": "Equal", "key": "example.com/reserved", "value": "yes", "tolerationSeconds": 30})
        }
        _ => {
            json!({"operator": "Equal", "key": "example.com/broken", "value": "", "effect": "NoExecute"})
        }
    }
}
