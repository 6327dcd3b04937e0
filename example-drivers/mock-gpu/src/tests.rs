use nodedock_sdk::testing::{Grant, Harness, bounds};
use nodedock_sdk::{
    AllocatedDevice, AttributeValue, Claim, ClaimRecord, Configuration, Context, Counter,
    HealthState, LeftOutDevice, ParametersSource, Prepared, Problem, ProblemKind,
};
use serde_json::{Value, json};

use crate::MockGpu;

fn node(pool: Value) -> Harness<MockGpu> {
    let node = Harness::new();
    node.config(json!({ "pools": [pool] }));
    node
}

fn shared_node() -> Harness<MockGpu> {
    node(json!({"name": "gpus", "count": 1, "shared": true}))
}

fn claim(uid: &str) -> Claim {
    Claim::new("default", "demo", uid).device("gpu", "gpus", "gpu-0")
}

fn sharing(uid: &str, parameters: Value) -> Claim {
    claim(uid).with_parameters(
        ParametersSource::Claim,
        [],
        json!({ "sharing": parameters }).to_string(),
    )
}

fn env(node: &Harness<MockGpu>, claim: &Claim) -> Vec<(String, String)> {
    node.prepare(claim)
        .unwrap()
        .devices
        .into_iter()
        .flat_map(|device| device.edits.env)
        .collect()
}

fn value<'a>(env: &'a [(String, String)], name: &str) -> Option<&'a str> {
    env.iter()
        .find(|(key, _)| key == name)
        .map(|(_, value)| value.as_str())
}

#[test]
fn the_shipped_files_fit_the_driver() {
    let grant = Grant::parse(include_str!("../mock-gpu.grant.yaml")).unwrap();
    let config: Value = serde_saphyr::from_str(include_str!("../mock-gpu.config.yaml")).unwrap();
    MockGpu::validate_config(&config.to_string()).unwrap();
    let node = Harness::<MockGpu>::new();
    let inventory = node.grant(&grant).config(config).discover().unwrap();
    assert!(inventory.device("gpus", "gpu-0").is_some());
}

#[test]
fn schemas_refuse_unknown_keys() {
    for schema in [MockGpu::config_schema(), MockGpu::parameters_schema()] {
        let schema: Value = serde_json::from_str(&schema.unwrap()).unwrap();
        assert_eq!(schema["additionalProperties"], false);
    }
}

#[test]
fn default_config_has_four_gpus() {
    let inventory = Harness::<MockGpu>::new().discover().unwrap();
    let gpu = inventory.device("gpus", "gpu-3").unwrap();
    assert_eq!(inventory.pools[0].devices.len(), 4);
    assert_eq!(gpu.attribute_value("index"), Some(&AttributeValue::Int(3)));
    assert_eq!(
        gpu.attribute_value("driverVersion"),
        Some(&AttributeValue::version("1.0.0"))
    );
    assert_eq!(
        (
            gpu.capacities[0].name.as_str(),
            gpu.capacities[0].value.as_str()
        ),
        ("memory", "80Gi")
    );
}

#[test]
fn left_out_devices_have_reasons() {
    let node = Harness::<MockGpu>::new();
    assert_eq!(node.left_out().unwrap(), []);
    node.config(json!({"leftOut": [{"name": "gpu-9", "reason": "its memory is broken"}]}));
    assert_eq!(
        node.left_out().unwrap(),
        [LeftOutDevice::new("gpu-9", "its memory is broken")]
    );
}

#[test]
fn gpus_are_spread_over_numa_nodes() {
    let node = node(
        json!({"name": "gpus", "count": 3, "numaNodes": [0, 1], "model": "Z", "memoryGiB": 16}),
    );
    let inventory = node.discover().unwrap();
    let nodes: Vec<_> = inventory.pools[0]
        .devices
        .iter()
        .map(|gpu| gpu.numa_nodes[0])
        .collect();
    assert_eq!(nodes, [0, 1, 0]);
    assert_eq!(
        inventory.pools[0].devices[0].attribute_value("model"),
        Some(&"Z".into())
    );
}

#[test]
fn uuids_are_stable_and_node_specific() {
    let node = Harness::<MockGpu>::new();
    let uuids = |node: &Harness<MockGpu>| -> Vec<_> {
        let pools = node.discover().unwrap().pools;
        pools[0]
            .devices
            .iter()
            .map(|gpu| gpu.attribute_value("uuid").cloned().unwrap())
            .collect()
    };
    let here = uuids(&node);
    assert_eq!(here, uuids(&node));
    assert_ne!(here[0], here[1]);
    node.context(Context {
        node_name: "elsewhere".into(),
        ..Context::default()
    });
    assert_ne!(here[0], uuids(&node)[0]);
}

#[test]
fn partitions_consume_counters_of_their_gpu() {
    let node = node(json!({"name": "gpus", "count": 1, "memoryGiB": 80, "partitions": 2}));
    let inventory = node.discover().unwrap();
    let (whole, part) = (
        inventory.device("gpus", "gpu-0").unwrap(),
        inventory.device("gpus", "gpu-0-part-1").unwrap(),
    );
    assert_eq!(
        inventory.pools[0].shared_counters[0].counters[0].value,
        "80Gi"
    );
    assert_eq!(
        (
            whole.consumes[0].counters[0].value.as_str(),
            part.consumes[0].counters[0].value.as_str()
        ),
        ("80Gi", "40Gi")
    );
    let other = inventory.device("gpus", "gpu-0-part-0").unwrap();
    assert!(whole.identity != part.identity && other.identity != part.identity);

    let claim = Claim::new("n", "c", "u").device("r", "gpus", "gpu-0-part-1");
    assert!(value(&env(&node, &claim), "MOCK_GPU_0_PART_1").is_some());
}

#[test]
fn claim_gets_gpu_and_sharing_settings() {
    let node = Harness::<MockGpu>::new();
    let env = env(&node, &claim("u"));
    assert!(value(&env, "MOCK_GPU_0").unwrap().starts_with("GPU-"));
    assert_eq!(value(&env, "MOCK_GPU_0_SHARING"), Some("Exclusive"));
    assert_eq!(value(&env, "MOCK_GPU_0_INTERVAL"), None);
}

#[test]
fn claim_parameters_override_class_parameters() {
    let class = json!({"sharing": {"strategy": "SpacePartitioning"}}).to_string();
    let claim = sharing(
        "u",
        json!({"strategy": "TimeSlicing", "timeSlicing": {"interval": "Long"}}),
    )
    .with_parameters(ParametersSource::DeviceClass, [], class);
    let env = env(&shared_node(), &claim);
    assert_eq!(value(&env, "MOCK_GPU_0_SHARING"), Some("TimeSlicing"));
    assert_eq!(value(&env, "MOCK_GPU_0_INTERVAL"), Some("Long"));
}

#[test]
fn container_gets_its_share_of_memory() {
    let mut device = AllocatedDevice::new("gpu", "gpus", "gpu-0");
    device.share_id = Some("3f".into());
    device.consumed.push(Counter {
        name: "memory".into(),
        value: "8Gi".into(),
    });
    let claim = Claim::new("n", "c", "u").with_device(device);
    assert_eq!(
        value(&env(&shared_node(), &claim), "MOCK_GPU_0_MEMORY"),
        Some("8Gi")
    );
}

#[test]
fn claims_sharing_a_gpu_must_agree() {
    let node = shared_node();
    let slicing = json!({"strategy": "TimeSlicing", "timeSlicing": {"interval": "Short"}});
    node.prepare(&sharing("one", slicing.clone())).unwrap();
    node.prepare(&sharing("two", slicing.clone())).unwrap();
    for other in [
        json!({"strategy": "TimeSlicing"}),
        json!({"strategy": "Exclusive"}),
    ] {
        let problem = node.prepare(&sharing("three", other)).unwrap_err();
        assert_eq!(
            (problem.kind, problem.code.as_str()),
            (ProblemKind::Conflict, "sharing-mismatch")
        );
    }
    node.unprepare("one").unwrap();
    node.unprepare("two").unwrap();
    node.prepare(&sharing("three", json!({"strategy": "Exclusive"})))
        .unwrap();
    assert!(
        node.fake()
            .log_lines()
            .iter()
            .any(|line| line.message == "sharing reset")
    );
}

#[test]
fn repeated_prepare_does_not_conflict() {
    let node = shared_node();
    let exclusive = sharing("one", json!({"strategy": "Exclusive"}));
    assert_eq!(node.prepare(&exclusive), node.prepare(&exclusive));
}

#[test]
fn conflicting_claims_in_batch_are_refused() {
    let node = shared_node();
    let exclusive = || sharing("one", json!({"strategy": "Exclusive"}));
    let refused = |outcome: &Result<Prepared, Problem>| {
        outcome.as_ref().unwrap_err().code == "sharing-mismatch"
    };
    let outcomes = node.prepare_batch(&[exclusive(), claim("two")]);
    assert!(outcomes.iter().all(|(_, outcome)| refused(outcome)));
    node.unprepare("two").unwrap();
    node.prepare(&exclusive()).unwrap();
    assert!(refused(&node.prepare(&claim("two"))));
}

#[test]
fn refused_claim_does_not_block_others() {
    let node = shared_node();
    node.prepare(&sharing("one", json!({"strategy": "Magic"})))
        .unwrap_err();
    node.prepare(&sharing("two", json!({"strategy": "Exclusive"})))
        .unwrap();
}

#[test]
fn admin_access_ignores_exclusive_sharing() {
    let node = shared_node();
    node.prepare(&sharing("one", json!({"strategy": "Exclusive"})))
        .unwrap();
    let mut device = AllocatedDevice::new("gpu", "gpus", "gpu-0");
    device.admin_access = true;
    let admin = Claim::new("n", "c", "admin").with_device(device);
    node.prepare(&admin).unwrap();
    node.unprepare("one").unwrap();
    node.prepare(&sharing("two", json!({"strategy": "SpacePartitioning"})))
        .unwrap();
}

#[test]
fn invalid_parameters_are_refused_with_reason() {
    let cases = [
        (
            json!({"sharing": {"strategy": "Magic"}}),
            "bad-parameters",
            "unknown variant `Magic`",
        ),
        (
            json!({"sharing": {}}),
            "bad-parameters",
            "missing field `strategy`",
        ),
        (
            json!({"sahring": {}}),
            "bad-parameters",
            "unknown field `sahring`",
        ),
        (
            json!({"sharing": {"strategy": "TimeSlicing", "timeSlicing": {"interval": "Never"}}}),
            "bad-parameters",
            "Never",
        ),
        (
            json!({"sharing": {"strategy": "Exclusive", "timeSlicing": {}}}),
            "strategy-mismatch",
            "TimeSlicing",
        ),
        (
            json!({"apiVersion": "v2"}),
            "unknown-type",
            "mock-gpu.nodedock.dev/v1",
        ),
        (json!({"kind": "Pod"}), "unknown-type", "GpuConfig"),
    ];
    for (parameters, code, reason) in cases {
        let refused = MockGpu::validate_parameters(&parameters.to_string()).unwrap_err();
        assert_eq!(
            (refused.kind, refused.code.as_str()),
            (ProblemKind::Invalid, code)
        );
        assert!(refused.message.contains(reason), "{refused} lacks {reason}");
        let claim = claim("u").with_parameters(ParametersSource::Claim, [], parameters.to_string());
        assert_eq!(shared_node().prepare(&claim).unwrap_err().code, code);
    }
    let typed = json!({"apiVersion": "mock-gpu.nodedock.dev/v1", "kind": "GpuConfig", "sharing": {"strategy": "TimeSlicing"}});
    MockGpu::validate_parameters(&typed.to_string()).unwrap();
}

#[test]
fn invalid_configs_are_refused_with_reason() {
    let pool = |pool: Value| json!({ "pools": [pool] });
    let cases = [
        (json!({"driverVersion": "1.0"}), "driverVersion"),
        (pool(json!({"name": "p"})), "missing field `count`"),
        (
            pool(json!({"name": "p", "count": 1, "color": 1})),
            "unknown field `color`",
        ),
        (pool(json!({"name": "P", "count": 1})), "DNS subdomain"),
        (pool(json!({"name": "p", "count": 4097})), "at most 4096"),
        (
            pool(json!({"name": "p", "count": 1, "memoryGiB": 0})),
            "at least 1",
        ),
        (
            pool(json!({"name": "p", "count": 1, "memoryGiB": 80, "partitions": 3})),
            "multiple",
        ),
        (
            pool(json!({"name": "p", "count": 1, "memoryGiB": 80, "partitions": 16})),
            "at most 15",
        ),
        (
            pool(json!({"name": "p", "count": 1, "partitions": 2, "shared": true})),
            "exclude",
        ),
        (
            pool(json!({"name": "p", "count": 9, "partitions": 2})),
            "at most 8 GPUs",
        ),
        (
            pool(json!({"name": "p", "count": 2, "firstIndex": u32::MAX})),
            "too large",
        ),
        (
            json!({"leftOut": [{"name": "gpu-9", "reason": ""}]}),
            "without a name or a reason",
        ),
        (
            json!({"leftOut": [{"name": "a", "reason": "x"}, {"name": "a", "reason": "y"}]}),
            "\"a\" twice",
        ),
        (
            pool(json!({"name": "p", "count": 1, "unhealthy": [{"index": 1, "message": "x"}]})),
            "no GPU 1",
        ),
        (
            json!({"pools": [{"name": "p", "count": 1}, {"name": "p", "count": 1, "firstIndex": 1}]}),
            "twice",
        ),
        (
            json!({"pools": [{"name": "p", "count": 2}, {"name": "q", "count": 1, "firstIndex": 1}]}),
            "firstIndex",
        ),
    ];
    for (config, reason) in cases {
        let problem = MockGpu::validate_config(&config.to_string()).unwrap_err();
        assert_eq!(problem.kind, ProblemKind::Invalid);
        assert!(problem.message.contains(reason), "{problem} lacks {reason}");
    }
}

#[test]
fn largest_inventories_are_within_the_bounds() {
    let whole = node(json!({"name": "gpus", "count": 4096}));
    assert_eq!(whole.discover().unwrap().pools[0].devices.len(), 4096);
    let parts = node(json!({"name": "gpus", "count": 8, "memoryGiB": 15, "partitions": 15}));
    assert_eq!(parts.discover().unwrap().pools[0].devices.len(), 128);
}

#[test]
fn health_is_what_the_config_says() {
    let node = node(json!({
        "name": "gpus", "count": 2, "firstIndex": 4, "partitions": 2, "unhealthy": [{"index": 5, "message": "too hot"}]
    }));
    let health = node.check().unwrap();
    assert_eq!(health.len(), 6);
    for device in &health {
        let hot = device.device.starts_with("gpu-5");
        assert_eq!(
            device.state,
            if hot {
                HealthState::Unhealthy
            } else {
                HealthState::Healthy
            }
        );
        assert_eq!(device.message, if hot { "too hot" } else { "" });
    }
}

#[test]
fn unsimulated_devices_are_not_found() {
    for (pool, device) in [("gpus", "gpu-9"), ("other", "gpu-0")] {
        let claim = Claim::new("n", "c", "u").device("r", pool, device);
        assert_eq!(
            Harness::<MockGpu>::new().prepare(&claim).unwrap_err().kind,
            ProblemKind::NotFound
        );
    }
}

#[test]
fn memo_of_other_version_is_problem() {
    let node = shared_node();
    let old = ClaimRecord {
        claim: claim("old"),
        prepared: true,
        memo: b"v0".to_vec(),
        ..ClaimRecord::default()
    };
    node.fake().claim(old);
    let problem = node.prepare(&claim("new")).unwrap_err();
    assert_eq!(problem.code, "bad-memo");
    assert_eq!(bounds::problem(&problem), Vec::<String>::new());
    node.unprepare("old").unwrap();
    node.prepare(&claim("new")).unwrap();
}
