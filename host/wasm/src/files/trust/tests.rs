use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use ed25519_dalek::Signer as _;
use p256::pkcs8::{EncodePublicKey, LineEnding};

use super::*;
use nodedock_base::error::chain;

const FILE: &[u8] = b"\0asm and so on";

fn ec(seed: u8) -> p256::ecdsa::SigningKey {
    p256::ecdsa::SigningKey::from_slice(&[seed; 32]).unwrap()
}

fn ed(seed: u8) -> ed25519_dalek::SigningKey {
    ed25519_dalek::SigningKey::from_bytes(&[seed; 32])
}

fn ec_pem(seed: u8) -> String {
    ec(seed)
        .verifying_key()
        .to_public_key_pem(LineEnding::LF)
        .unwrap()
}

fn ed_pem(seed: u8) -> String {
    ed(seed)
        .verifying_key()
        .to_public_key_pem(LineEnding::LF)
        .unwrap()
}

fn ec_signature(seed: u8, bytes: &[u8]) -> String {
    let signature: p256::ecdsa::Signature = ec(seed).sign(bytes);
    STANDARD.encode(signature.to_der())
}

fn indented(pem: &str) -> String {
    pem.trim()
        .lines()
        .map(|line| format!("\n      {line}"))
        .collect()
}

fn key(name: &str, pem: &str, more: &str) -> String {
    format!("  - name: {name}\n    pem: |{}\n{more}", indented(pem))
}

fn try_policy(text: &str) -> Result<Policy, String> {
    let section: Section = serde_saphyr::from_str(text).map_err(|error| error.to_string())?;
    section
        .check(Path::new("/nowhere"))
        .map_err(|error| chain(&error))
}

fn policy(text: &str) -> Policy {
    try_policy(text).unwrap()
}

fn of_keys(mode: &str, keys: &str, pins: &str) -> Policy {
    policy(&format!("mode: {mode}\nkeys:\n{keys}{pins}"))
}

fn judge(policy: &Policy, signature: Option<&str>) -> TrustDecision {
    let signature = signature.map(str::as_bytes);
    policy.judge("gpu", FILE, signature)
}

fn digest() -> String {
    digest_text(&Sha256::digest(FILE).into())
}

fn said(verdict: &TrustDecision) -> String {
    verdict
        .distrust
        .as_ref()
        .map(ToString::to_string)
        .unwrap_or_default()
}

#[test]
fn signature_by_known_key_is_trusted() {
    let pure = STANDARD.encode(ed(3).sign(FILE).to_bytes());
    let hash = <sha2::Sha512 as sha2::Digest>::new_with_prefix(FILE);
    let prehashed = STANDARD.encode(ed(3).sign_prehashed(hash, None).unwrap().to_bytes());
    let keys = key("ec", &ec_pem(1), "") + &key("ed", &ed_pem(3), "");
    let policy = of_keys("enforce", &keys, "");
    for (signature, by) in [
        (ec_signature(1, FILE), "ec"),
        (pure, "ed"),
        (prehashed, "ed"),
    ] {
        let verdict = judge(&policy, Some(&signature));
        assert_eq!(
            (verdict.key.as_deref(), said(&verdict)),
            (Some(by), String::new())
        );
        assert!(
            !verdict.refuses()
                && verdict.view().verdict == "trusted"
                && verdict.digest() == digest()
        );
    }
}

#[test]
fn unsigned_and_wrongly_signed_are_refused() {
    let keys = key("ec", &ec_pem(1), "") + &key("ed", &ed_pem(3), "");
    let policy = of_keys("enforce", &keys, "");
    let ed_over_digest = STANDARD.encode(
        ed(3)
            .sign(&<sha2::Sha256 as sha2::Digest>::digest(FILE))
            .to_bytes(),
    );
    let cases = [
        (None, "there is no gpu.wasm.sig"),
        (
            Some(String::new()),
            "gpu.wasm.sig holds no signature: it is empty",
        ),
        (
            Some("a b c!".to_owned()),
            "gpu.wasm.sig holds no signature: 6 bytes",
        ),
        (
            Some(ec_signature(2, FILE)),
            "no signature of this very file by a key of the config (ec, ed)",
        ),
        (
            Some(ec_signature(1, b"another file")),
            "no signature of this very file",
        ),
        (Some(ed_over_digest), "no signature of this very file"),
        (
            Some(STANDARD.encode([0; 64])),
            "no signature of this very file",
        ),
    ];
    for (signature, words) in cases {
        let verdict = judge(&policy, signature.as_deref());
        assert!(said(&verdict).contains(words), "{words} in {verdict:?}");
        assert!(
            verdict.refuses() && verdict.key.is_none() && verdict.view().verdict == "distrusted"
        );
    }
}

#[test]
fn the_mode_says_what_follows() {
    for (mode, refuses, warns, word) in [
        ("off", false, false, "unchecked"),
        ("warn", false, true, "distrusted"),
        ("enforce", true, false, "distrusted"),
    ] {
        let verdict = judge(&of_keys(mode, &key("ec", &ec_pem(1), ""), ""), None);
        assert_eq!(
            (verdict.refuses(), verdict.warns(), verdict.view().verdict),
            (refuses, warns, word)
        );
    }
    assert_eq!(judge(&Policy::default(), None).mode, Mode::Off);
}

#[test]
fn key_trusts_only_its_driver_names() {
    let key_for = |names: &str| {
        of_keys(
            "enforce",
            &key("ec", &ec_pem(1), &format!("    drivers: [{names}]\n")),
            "",
        )
    };
    let signature = ec_signature(1, FILE);
    for (names, stem_fits, name_fits) in [
        ("gpu.example.com", true, true),
        ("'gpu.*'", true, true),
        ("'*.example.com'", true, true),
        ("gpu.other.com", true, false),
        ("'nic.*', gpu.example.com", true, true),
        ("'{gpu.example,nic.example}.com'", true, true),
        ("nic.example.com", false, false),
    ] {
        let policy = key_for(names);
        let before = judge(&policy, Some(&signature));
        let after = policy.judge_named(&before, "gpu.example.com");
        assert_eq!(
            (before.distrust.is_none(), after.distrust.is_none()),
            (stem_fits, name_fits),
            "{names}"
        );
        assert_eq!(
            after.key.as_deref(),
            Some("ec"),
            "the signer is reported all the same"
        );
    }
    let said_of = |verdict: TrustDecision| said(&verdict);
    let policy = key_for("nic.example.com");
    let before = judge(&policy, Some(&signature));
    assert!(
        said_of(policy.judge_named(&before, "gpu.example.com"))
            .contains("named nic.example.com only, not gpu.example.com")
    );
    assert!(said_of(before).contains("it is called gpu.wasm"));
}

#[test]
fn pins_hold_beside_signatures_and_alone() {
    let pins = |of: &str, digest: &str| format!("pins:\n  {of}: ['{digest}']\n");
    let other = format!("sha256:{}", "0".repeat(64));
    let keys = key("ec", &ec_pem(1), "");
    let signature = ec_signature(1, FILE);
    let full = |pins: &str, signature: Option<&str>| {
        let policy = of_keys("enforce", &keys, pins);
        policy.judge_named(&judge(&policy, signature), "gpu.example.com")
    };
    for of in ["gpu", "gpu.example.com"] {
        let verdict = full(&pins(of, &digest()), Some(&signature));
        assert_eq!(
            (verdict.pin.as_deref(), said(&verdict)),
            (Some(of), String::new())
        );
        let verdict = full(&pins(of, &other), Some(&signature));
        assert!(
            said(&verdict).contains(&format!("{} is not pinned for {of}", digest())),
            "{verdict:?}"
        );
        assert_eq!(verdict.key.as_deref(), Some("ec"));
        assert!(
            said(&full(&pins(of, &digest()), None)).contains("not signed"),
            "a pin is no signature"
        );
    }
    assert!(
        full(&pins("nic", &other), Some(&signature))
            .distrust
            .is_none(),
        "it is another driver's"
    );

    let alone = |pins: &str| {
        let policy = policy(&format!("mode: enforce\n{pins}"));
        policy.judge_named(&judge(&policy, None), "gpu.example.com")
    };
    assert!(alone(&pins("gpu", &digest())).distrust.is_none());
    assert!(said(&alone(&pins("gpu", &other))).contains("not pinned"));
    assert!(said(&alone(&pins("nic", &other))).contains("nothing vouches for it"));
    assert!(said(&alone("")).contains(&digest()));
}

/// A file whose digest was pinned under its driver's name was refused before that name was known.
#[test]
fn pin_is_checked_against_driver_name() {
    let other = format!("sha256:{}", "0".repeat(64));
    let before = |pins: &str| judge(&policy(&format!("mode: enforce\npins: {{{pins}}}\n")), None);
    let of_name = format!("gpu.example.com: ['{}']", digest());
    let of_another = format!("nic.example.com: ['{}']", digest());
    for (pins, wanted) in [(&of_name, true), (&of_another, false)] {
        let verdict = before(pins);
        assert!(
            !verdict.refuses() && verdict.view().verdict == "trusted",
            "{verdict:?}"
        );
        let policy = policy(&format!("mode: enforce\npins: {{{pins}}}\n"));
        let after = policy.judge_named(&verdict, "gpu.example.com");
        assert_eq!(!after.refuses(), wanted, "{after:?}");
        assert_eq!(after.pin.as_deref(), wanted.then_some("gpu.example.com"));
    }
    assert!(
        said(&before(&format!("gpu.example.com: ['{other}']"))).contains("nothing vouches for it")
    );
    let both = format!("gpu: ['{other}'], {of_name}");
    assert!(
        said(&before(&both)).contains("is not pinned for gpu"),
        "its stem has a pin of its own"
    );

    let keys = key("ec", &ec_pem(1), "");
    let unsigned = judge(
        &of_keys("enforce", &keys, &format!("pins: {{{of_name}}}\n")),
        None,
    );
    assert!(
        said(&unsigned).contains("not signed") && unsigned.refuses(),
        "a pin is no signature"
    );
}

#[test]
fn removed_key_invalidates_its_signatures() {
    let both = of_keys(
        "enforce",
        &(key("a", &ec_pem(1), "") + &key("b", &ed_pem(3), "")),
        "",
    );
    let seen = judge(&both, Some(&ec_signature(1, FILE)));
    let left = of_keys("enforce", &key("b", &ed_pem(3), ""), "");
    let verdict = left.judge_named(&seen, "gpu.example.com");
    assert!(
        verdict.refuses() && said(&verdict).contains("by a key of the config (b)"),
        "{verdict:?}"
    );
    let renamed = of_keys("enforce", &key("c", &ec_pem(1), ""), "");
    assert_eq!(
        renamed.judge_named(&seen, "gpu.example.com").key.as_deref(),
        Some("c")
    );
    assert!(
        policy("mode: enforce\n")
            .judge_named(&seen, "gpu.example.com")
            .refuses(),
        "no keys are left"
    );
}

#[test]
fn only_another_policy_is_a_change() {
    let trust = Trust::new(Policy::default());
    let changes = trust.changes();
    assert!(!trust.replace(Policy::default()) && !changes.has_changed().unwrap());
    assert!(trust.replace(policy("mode: warn\n")) && changes.has_changed().unwrap());
    assert_eq!(trust.policy().mode(), Mode::Warn);
}

#[test]
fn policy_errors_name_key_and_place() {
    let good = key("a", &ec_pem(1), "");
    let zeros = "0".repeat(64);
    let rsa = "-----BEGIN PUBLIC KEY-----
MIGfMA0GCSqGSIb3DQEBAQUAA4GNADCBiQKBgQC17oOL35vmN8ikmmZaYZGvszl9
lG+Kt4DHaHUjrMQks74jJO7vhyKR2kwBTDCL5XfteG6TJh7bD3sg1G/euYUerU53
elnva0mmC72yNk3Zv6VT4yPwtw/8qlX98Roe2UXWzg84O/ZLhVOhI6cES6rATiFW
TwpVYrKsUf0xrfVD4wIDAQAB
-----END PUBLIC KEY-----";
    let p384 = "-----BEGIN PUBLIC KEY-----
MHYwEAYHKoZIzj0CAQYFK4EEACIDYgAE0I1UBlw6TyMIPXrwzOvynGwMVcOi3uau
XnkYPcGw7P9jNe0dlgpGvFB8bx97Kdt7uYqBqtFMyPOPzyrhQtQeXuDJFvKz+24G
RFO3SKpOQ3qvL0J6QirpLf6geXBQroo5
-----END PUBLIC KEY-----";
    let private = "-----BEGIN PRIVATE KEY-----\nMC4CAQAwBQYDK2VwBCIEIAMDAwMDAwMDAwMDAwMDAwMDAwMDAwMDAwMDAwMDAwMD\n-----END PRIVATE KEY-----\n";
    let cases: Vec<(String, &[&str])> = vec![
        ("mode: strict\n".into(), &["strict", "line 1"]),
        ("mode: warn\nkey: []\n".into(), &["key", "line 2"]),
        (
            format!("keys:\n{good}    colour: red\n"),
            &["colour", "line"],
        ),
        (
            "keys:\n  - {name: a}\n".into(),
            &["line 2", "key a has neither"],
        ),
        (
            "keys:\n  - {name: a, file: x, pem: y}\n".into(),
            &["line 2", "key a has both"],
        ),
        (
            "keys:\n  - {name: a, file: gone.pem}\n".into(),
            &[
                "line 2, column 21",
                "key a",
                "/nowhere/gone.pem",
                "No such file",
            ],
        ),
        (
            "keys:\n  - {name: a, pem: hello}\n".into(),
            &["line 2", "key a", "BEGIN PUBLIC KEY"],
        ),
        (
            "keys:\n  - {name: '', pem: hello}\n".into(),
            &["line 2", "a key's name is \"\""],
        ),
        (
            format!("keys:\n{}", key("old", rsa, "")),
            &[
                "line 4",
                "key old",
                "an RSA key, and ECDSA P-256 and Ed25519 are taken",
            ],
        ),
        (
            format!("keys:\n{}", key("big", p384, "")),
            &["key big", "curve 1.3.132.0.34"],
        ),
        (
            format!("keys:\n{}", key("mine", private, "")),
            &["key mine", "\"PRIVATE KEY\" and not a public key"],
        ),
        (format!("keys:\n{good}{good}"), &["two keys named a"]),
        (
            format!("keys:\n{good}{}", key("b", &ec_pem(1), "")),
            &["key b is the same key as a"],
        ),
        (
            format!("keys:\n{}", key("a", &ec_pem(1), "    drivers: []\n")),
            &["key a", "1 to 64 globs"],
        ),
        (
            format!("keys:\n{}", key("a", &ec_pem(1), "    drivers: ['[']\n")),
            &["key a", "\"[\" is not a glob"],
        ),
        (
            format!("keys:\n{}", key("a", &ec_pem(1), "    drivers: [a/b]\n")),
            &["key a", "\"a/b\" is not a glob"],
        ),
        (
            "pins: {gpu: []}\n".into(),
            &["line 1", "trust.pins.gpu is empty"],
        ),
        (
            "pins:\n  gpu: [sha256:00]\n".into(),
            &["line 2", "trust.pins.gpu", "64 lowercase hex"],
        ),
        (
            format!("pins: {{gpu: ['sha256:{zeros}', 'sha256:{zeros}']}}\n"),
            &["trust.pins.gpu has", "twice"],
        ),
        (
            format!("pins: {{a/b: ['sha256:{zeros}']}}\n"),
            &["\"a/b\" is neither"],
        ),
        (
            format!("pins:\n  a: ['sha256:{zeros}']\n  a: ['sha256:{zeros}']\n"),
            &["duplicate", "line 3"],
        ),
    ];
    for (text, expected) in cases {
        let error = try_policy(&text).expect_err(&text);
        for part in expected {
            assert!(error.contains(part), "{part:?} in {error:?}");
        }
    }
}

#[test]
fn weak_and_invalid_keys_are_refused() {
    let pem = |der: &[u8]| {
        let text = STANDARD.encode(der);
        format!("-----BEGIN PUBLIC KEY-----\n{text}\n-----END PUBLIC KEY-----\n")
    };
    let mut weak = hex::decode("302a300506032b6570032100").unwrap();
    weak.extend([1].into_iter().chain([0; 31]));
    assert!(matches!(PublicKey::parse(&pem(&weak)), Err(KeyError::Weak)));
    let mut off_curve =
        hex::decode("3059301306072a8648ce3d020106082a8648ce3d030107034200").unwrap();
    off_curve.extend([4].into_iter().chain([7; 64]));
    let wrapped = |der: &[u8]| {
        let text = STANDARD.encode(der);
        let (first, rest) = text.split_at(64);
        format!("-----BEGIN PUBLIC KEY-----\n{first}\n{rest}\n-----END PUBLIC KEY-----\n")
    };
    assert!(matches!(
        PublicKey::parse(&wrapped(&off_curve)),
        Err(KeyError::Malformed(_))
    ));
    let cut = &off_curve[..off_curve.len() - 8];
    assert!(PublicKey::parse(&wrapped(cut)).is_err());
}

#[test]
fn key_files_are_relative_to_config() {
    let directory = tempfile::tempdir().unwrap();
    std::fs::write(directory.path().join("release.pub"), ed_pem(3)).unwrap();
    let section: Section =
        serde_saphyr::from_str("mode: warn\nkeys:\n  - {name: release, file: release.pub}\n")
            .unwrap();
    let policy = section.check(directory.path()).unwrap();
    assert_eq!(
        judge(&policy, Some(&STANDARD.encode(ed(3).sign(FILE).to_bytes())))
            .key
            .as_deref(),
        Some("release")
    );
    let single = Policy::of_key_file(&directory.path().join("release.pub")).unwrap();
    assert_eq!(
        judge(&single, Some(&STANDARD.encode(ed(3).sign(FILE).to_bytes())))
            .key
            .as_deref(),
        Some("release")
    );
    std::fs::write(directory.path().join("release.pub"), [0xff; 20]).unwrap();
    assert!(
        chain(&section.check(directory.path()).unwrap_err()).contains("release.pub is not text")
    );
    std::fs::write(directory.path().join("release.pub"), vec![b'x'; 1 << 20]).unwrap();
    assert!(chain(&section.check(directory.path()).unwrap_err()).contains("larger than"));
}
