//! Strangers call while ranks meet: all are refused and logged, none costs memory, and the ranks still get in.
#![expect(clippy::unwrap_used, reason = "a test fails loudly")]

use deuteron_chaos::{Authority, Case, Directory, IDENTITY, Plan, Rank, now};
use deuteron_collective::{
    SERVER_NAME,
    frame::{Hello, PROTOCOL, Purpose, VERSION},
};
use rustls::{
    ClientConfig, ClientConnection, RootCertStore, StreamOwned,
    crypto::ring,
    pki_types::{CertificateDer, PrivateKeyDer, ServerName, pem::PemObject},
    version::TLS13,
};
use std::{
    fs,
    io::{Read, Write},
    net::{SocketAddr, TcpStream},
    path::Path,
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

const RANK: &str = env!("CARGO_BIN_EXE_rank");
const PATIENCE: Duration = Duration::from_secs(8);

/// A rank that listens, and how to reach it.
struct Target {
    name: &'static str,
    ranks: Vec<Rank>,
    plan: Plan<'static>,
    at: SocketAddr,
    /// What rank 1 would say.
    hello: Hello,
    tls: bool,
}

trait Stream: Read + Write {}
impl<S: Read + Write> Stream for S {}

/// What a stranger shows in a TLS handshake.
enum Shows<'a> {
    Nothing,
    Certificate(&'a Path),
}

/// A stranger's connection, and the port by which the log knows it.
struct Call {
    stream: Box<dyn Stream>,
    port: u16,
}

impl Target {
    /// Rank 0 waits for rank 1 at the meeting point.
    fn rendezvous(name: &'static str, plan: Plan<'static>, tls: bool) -> Self {
        let (at, ranks) = (plan.at(), vec![plan.start_one(0)]);
        let hello =
            Hello { generation: 0, from: 1, to: 0, purpose: Purpose::Rendezvous, token: [0; 16] };
        Self { name, ranks, plan, at, hello, tls }
    }

    /// Rank 0 waits for rank 1 to connect, which knows where but holds.
    fn group(name: &'static str, plan: Plan<'static>, tls: bool) -> Self {
        let plan = plan.with("who=1").with("hold=3");
        let ranks = plan.start();
        ranks[1].line("HELD");
        let gathered: Vec<Vec<Vec<u8>>> = ranks[1]
            .lines()
            .iter()
            .filter_map(|line| line.strip_prefix("GATHERED "))
            .map(|line| line.split(' ').map(from_hex).collect())
            .collect();
        let at = String::from_utf8(gathered[2][0].clone()).unwrap().parse().unwrap();
        let token = gathered[0][0][..16].try_into().unwrap();
        let hello = Hello { generation: 0, from: 1, to: 0, purpose: Purpose::Data, token };
        Self { name, ranks, plan, at, hello, tls }
    }

    fn connect(&self) -> TcpStream {
        let start = Instant::now();
        loop {
            match TcpStream::connect(self.at) {
                Ok(stream) => {
                    stream.set_read_timeout(Some(PATIENCE)).unwrap();
                    return stream;
                }
                Err(error) => assert!(start.elapsed() < PATIENCE, "{}: {error}", self.name),
            }
            thread::sleep(Duration::from_millis(5));
        }
    }

    /// In clear text, whatever the target speaks.
    fn call_plainly(&self) -> Call {
        let stream = self.connect();
        Call { port: stream.local_addr().unwrap().port(), stream: Box::new(stream) }
    }

    fn call_showing(&self, shows: &Shows<'_>) -> Call {
        let stream = self.connect();
        let port = stream.local_addr().unwrap().port();
        let read =
            |directory: &Path, index: usize| fs::read(directory.join(IDENTITY[index])).unwrap();
        let mut roots = RootCertStore::empty();
        let authority = read(&self.plan.certificates().join("0"), 0);
        roots.add(CertificateDer::from_pem_slice(&authority).unwrap()).unwrap();
        let config = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
            .with_protocol_versions(&[&TLS13])
            .unwrap()
            .with_root_certificates(roots);
        let config = match shows {
            Shows::Nothing => config.with_no_client_auth(),
            Shows::Certificate(directory) => {
                let certificate = CertificateDer::from_pem_slice(&read(directory, 1)).unwrap();
                let key = PrivateKeyDer::from_pem_slice(&read(directory, 2)).unwrap();
                config.with_client_auth_cert(vec![certificate], key).unwrap()
            }
        };
        let name = ServerName::try_from(SERVER_NAME).unwrap();
        let connection = ClientConnection::new(Arc::new(config), name).unwrap();
        Call { port, stream: Box::new(StreamOwned::new(connection, stream)) }
    }

    /// As somebody who has come past the handshake: a member of the job that this group does not know.
    fn call(&self) -> Call {
        match self.tls {
            true => self.call_showing(&Shows::Certificate(&self.plan.certificates().join("1"))),
            false => self.call_plainly(),
        }
    }

    /// The call is over, and the log says who it was and why it was refused.
    fn expect_refusal(&self, mut call: Call, why: &str) -> String {
        let (mut heard, start) = (Vec::new(), Instant::now());
        // A refusal ends in an answer, an alert or a reset.
        let _ = call.stream.read_to_end(&mut heard);
        assert!(start.elapsed() < PATIENCE, "{}: it was not refused: {why}", self.name);
        let heard = String::from_utf8_lossy(&heard);
        let log = self.ranks[0].wait_until(why, |lines| {
            lines.iter().find(|line| line.contains(&format!(":{}: ", call.port))).cloned()
        });
        assert!(log.starts_with("LOG WARN") && log.contains("refused"), "{log}");
        assert!(log.contains(why), "{}: {why:?} is not in {log:?}", self.name);
        heard.into_owned()
    }

    fn say(&self, bytes: &[u8], why: &str) {
        let mut call = self.call();
        // What is much too long may be cut off while it is written.
        let whole = call.stream.write_all(bytes).and_then(|()| call.stream.flush());
        let heard = self.expect_refusal(call, why);
        let answered = heard.contains(why) || (whole.is_err() && bytes.len() > 10_000);
        assert!(answered, "{}: {why:?} is not in {heard:?}", self.name);
    }

    fn memory(&self) -> u64 {
        let status = fs::read_to_string(format!("/proc/{}/status", self.ranks[0].pid)).unwrap();
        let peak = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
        peak.trim().trim_end_matches(" kB").parse().unwrap()
    }

    /// Everything that can be wrong in a greeting.
    fn greet_wrongly(&self) {
        let good = self.hello.encode();
        let with = |change: &dyn Fn(&mut Hello)| {
            let mut hello = self.hello.clone();
            change(&mut hello);
            hello.encode()
        };
        let patched = |place: usize, bytes: &[u8]| {
            let mut all = good.clone();
            all[place..place + bytes.len()].copy_from_slice(bytes);
            all
        };
        self.say(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n", "not Deuteron's protocol");
        self.say(&[0xff; 100_000], "not Deuteron's protocol");
        self.say(&patched(10, &[255]), "a length of 255 is over the bound");
        let other = &[&b"DEUTERON"[..], &9u16.to_le_bytes(), &[5, 0], b"9.9.9", &[7; 80]].concat();
        self.say(other, "protocol 9 (package 9.9.9)");
        self.say(other, &format!("protocol {PROTOCOL} (package {VERSION})"));
        self.say(&patched(11, &[1]), "the field reserved");
        self.say(&patched(12 + VERSION.len() + 16, &[9]), "the field purpose");
        self.say(&with(&|hello| hello.generation = 4), "you are of generation 4, this is 0");
        self.say(&with(&|hello| hello.to = 3), "you called rank 3, this is rank 0");
        self.say(&[&good[..], b"and more"].concat(), "bytes follow the greeting");
        if self.hello.purpose == Purpose::Rendezvous {
            self.say(&with(&|hello| hello.from = 7), "rank 7");
            self.say(&with(&|hello| hello.purpose = Purpose::Data), "rank 1");
        } else {
            self.say(&with(&|hello| hello.token[3] ^= 1), "you are not of this group");
            self.say(&with(&|hello| hello.from = 7), "you are not of this group");
            self.say(&with(&|hello| hello.purpose = Purpose::Memory), "you are not of this group");
        }
    }

    /// Everything that can be wrong before a greeting.
    fn authenticate_wrongly(&self) {
        if !self.tls {
            return;
        }
        let mut plain = self.call_plainly();
        plain.stream.write_all(&self.hello.encode()).unwrap();
        self.expect_refusal(plain, "");
        for shows in [None, Some(Authority::new())] {
            let directory = Directory::new();
            let path = directory.path().join("member");
            let mut call = match &shows {
                None => self.call_showing(&Shows::Nothing),
                Some(authority) => {
                    authority.write_member(&path);
                    self.call_showing(&Shows::Certificate(&path))
                }
            };
            // The caller may believe that it is through before the other side has looked at its certificate.
            let _ = call.stream.write_all(&self.hello.encode());
            self.expect_refusal(
                call,
                if shows.is_none() { "no certificates" } else { "certificate" },
            );
        }
        if self.hello.purpose == Purpose::Data {
            // A certificate of the job, but another rank's.
            let own = self.plan.certificates().join("0");
            let mut call = self.call_showing(&Shows::Certificate(&own));
            call.stream.write_all(&self.hello.encode()).unwrap();
            self.expect_refusal(call, "your certificate is not the one that rank 1 has told");
        }
    }

    /// Rank 1 comes at last.
    fn let_in(&mut self) {
        let start = now();
        match self.ranks.get(1) {
            Some(rank) => rank.release(),
            None => self.ranks.push(self.plan.start_one(1)),
        }
        for rank in &self.ranks {
            rank.line("READY");
        }
        let took = now() - start;
        assert!(took < Duration::from_secs(2), "{}: the ranks met after {took:?}", self.name);
    }
}

fn from_hex(text: &str) -> Vec<u8> {
    let digits = |place: usize| u8::from_str_radix(&text[place..place + 2], 16).unwrap();
    (0..text.len()).step_by(2).map(digits).collect()
}

#[test]
fn strangers_are_refused_and_logged_and_the_ranks_get_in() {
    let _case = Case::within(100);
    let plan = || Plan::new(RANK, 2).with("share=no").with("len=1000");
    let mut targets = [
        Target::rendezvous("rendezvous", plan(), false),
        Target::rendezvous("rendezvous with TLS", plan().tls(), true),
        Target::group("group", plan(), false),
        Target::group("group with TLS", plan().tls(), true),
    ];
    // Half a greeting, then silence.
    let slow: Vec<(Call, Instant)> = targets
        .iter()
        .map(|target| {
            let mut call = target.call();
            call.stream.write_all(&target.hello.encode()[..20]).unwrap();
            (call, Instant::now())
        })
        .collect();
    let before: Vec<u64> = targets.iter().map(Target::memory).collect();
    for target in &targets {
        target.authenticate_wrongly();
        target.greet_wrongly();
    }
    for (target, (call, start)) in targets.iter().zip(slow) {
        target.expect_refusal(call, "");
        assert!(start.elapsed() < Duration::from_secs(7), "{}: {:?}", target.name, start.elapsed());
    }
    for (target, before) in targets.iter_mut().zip(before) {
        let idle: Vec<TcpStream> = (0..300).map(|_| target.connect()).collect();
        target.ranks[0].wait_until("that many were refused", |lines| {
            (lines.iter().filter(|line| line.contains("refused a connection")).count() > 230)
                .then_some(())
        });
        let grown = target.memory() - before;
        assert!(grown < 6 << 10, "{}: strangers cost {grown} KiB", target.name);
        target.let_in();
        drop(idle);
    }
}
