//! Parameters of claims and classes: verdicts by the schema and by the driver, and schemas that are not valid.

use serde_json::{Value, json};

use super::guest::PREPARE_ONE;
use super::*;
use nodedock_core::driver::{ClaimDriver, validate_claims};
use nodedock_model::{ConfigSource, DriverClaim, OpaqueConfig, Problem};

const VALID: &str = "i32.const 8192";

fn guest(schema: Option<&Value>, validate: &str) -> Guest {
    let guest = Guest {
        prepare: PREPARE_ONE.into(),
        ..Guest::default()
    };
    guest.validates(schema, validate)
}

fn ports() -> Value {
    json!({
        "type": "object", "additionalProperties": false, "required": ["ports"],
        "properties": {"ports": {"type": "array", "items": {"type": "integer", "maximum": 65535}}}
    })
}

async fn verdicts(driver: &WasmDriver, parameters: &[&str]) -> Vec<Result<(), Problem>> {
    driver.validate_parameters(&a_call(), parameters).await
}

#[tokio::test]
async fn schema_comes_before_the_driver() {
    let stage = Stage::new();
    // A driver that fails for all parameters.
    let driver = stage.load(&guest(Some(&ports()), "unreachable")).await;
    let found = verdicts(
        &driver,
        &[r#"{"ports": [1, 70000]}"#, "[", r#"{"ports": []}"#],
    )
    .await;
    let codes: Vec<_> = found
        .iter()
        .map(|verdict| verdict.as_ref().unwrap_err().code.as_str())
        .collect();
    assert_eq!(codes, ["schema-violated", "not-json", "driver-trapped"]);
    let violated = found[0].as_ref().unwrap_err();
    assert!(violated.message.contains("/ports/1: 70000"), "{violated}");
    assert_eq!(
        violated.details,
        [("path".to_owned(), "/ports/1".to_owned())]
    );
    assert!(violated.kind.is_permanent());
}

#[tokio::test]
async fn driver_refuses_what_schema_allows() {
    let stage = Stage::new();
    let mut guest = Guest::default();
    let at = guest.verdict(
        &json!({"kind": "invalid", "code": "odd", "message": "an even number of bytes, please"}),
    );
    // By the length of the text, which is the second parameter.
    let is_odd = "(i32.rem_u (local.get 1) (i32.const 2))";
    let validate = format!("(select (i32.const {at}) (i32.const 8192) {is_odd})");
    let driver = stage.load(&guest.validates(None, &validate)).await;
    let found = verdicts(&driver, &["{}", "{ }"]).await;
    assert_eq!(found[0], Ok(()));
    let problem = found[1].as_ref().unwrap_err();
    assert_eq!(
        (problem.code.as_str(), problem.message.as_str()),
        ("odd", "an even number of bytes, please")
    );
}

#[tokio::test]
async fn driver_without_facet_takes_all_parameters() {
    let driver = Stage::new().load(&Guest::default()).await;
    assert_eq!(
        verdicts(&driver, &["{}", "no JSON"]).await,
        [Ok(()), Ok(())]
    );
    assert_eq!(driver.parameters_schema(&a_call()).await, Ok(None));
    assert_eq!(calls(&driver), 1, "describe alone");
}

#[tokio::test]
async fn invalid_parameter_schema_refuses_load() {
    let stage = Stage::new();
    for (schema, says) in [
        (json!({"type": 5}), "schema of its parameters is not valid"),
        (json!({"$ref": "#"}), "refers to itself"),
        (json!({"pattern": "((\\w{100}){100}){100}"}), "is not a"),
        (
            json!({"description": "x".repeat(300_000)}),
            "bytes, at most",
        ),
    ] {
        let driver = stage.load(&guest(Some(&schema), VALID)).await;
        let problem = driver.validate_config(&a_call()).await.unwrap_err();
        assert_eq!(problem.code, "schema-invalid");
        assert!(problem.message.contains(says), "{says}: {problem}");
        assert_eq!(
            driver.parameters_schema(&a_call()).await,
            Err(problem.clone())
        );
        assert_eq!(verdicts(&driver, &["{}"]).await, [Err(problem)]);
    }
}

#[tokio::test]
async fn schema_is_published_after_load() {
    let driver = Stage::new().load(&guest(Some(&ports()), VALID)).await;
    assert_eq!(driver.parameters_summary(), None);
    driver.validate_config(&a_call()).await.unwrap();
    assert_eq!(
        driver.parameters_summary().as_deref(),
        Some("ports (required)")
    );
    let before = calls(&driver);
    assert_eq!(driver.parameters_schema(&a_call()).await, Ok(Some(ports())));
    assert_eq!(calls(&driver), before, "it is read once");
}

/// A claim that the driver prepared stays one that it can unprepare, whatever its schema is by then.
#[tokio::test]
async fn unprepare_needs_no_valid_parameters() {
    let refuses_all = guest(Some(&json!(false)), VALID);
    let driver = Stage::new()
        .load(&Guest {
            unprepare: PREPARE_ONE.into(),
            ..refuses_all
        })
        .await;
    let live = nodedock_model::DriverClaimRecord {
        claim: with("{}"),
        prepared: true,
        memo: Vec::new(),
        driver_version: "1.2.3".into(),
        boot_id: "boot-1".into(),
    };
    assert_eq!(
        verdicts(&driver, &["{}"]).await[0]
            .as_ref()
            .unwrap_err()
            .code,
        "schema-violated"
    );
    assert_eq!(driver.unprepare(&a_call(), &[live]).await["u-1"], Ok(()));
}

fn with(parameters: &str) -> DriverClaim {
    let config = OpaqueConfig {
        source: ConfigSource::DeviceClass,
        requests: vec!["gpu".into()],
        driver: DriverName::new(guest::NAME).unwrap(),
        parameters: parameters.into(),
    };
    DriverClaim {
        configs: vec![config],
        ..a_claim("u-1")
    }
}

#[tokio::test]
async fn claim_problem_names_the_parameters() {
    let driver = Stage::new().load(&guest(Some(&ports()), VALID)).await;
    let verdicts = |claim: DriverClaim| {
        let driver = &driver;
        async move { validate_claims(driver, &a_call(), &[claim]).await }
    };
    assert_eq!(verdicts(with(r#"{"ports": []}"#)).await["u-1"], Ok(()));
    assert!(verdicts(a_claim("u-1")).await.is_empty());
    let outcomes = verdicts(with(r#"{"port": 1}"#)).await;
    let problem = outcomes["u-1"].as_ref().unwrap_err();
    let says = "parameters of the DeviceClass for driver tiny.example.com (requests gpu): the parameters do not fit";
    assert!(problem.message.starts_with(says), "{problem}");
}
