//! Reduction kernels: read P streams, combine them in a fixed order, write every result once.
//!
//! 1. Sources are combined in the order given, element by element, so equal inputs give equal bits
//!    on every rank.
//! 2. `f16` and `bf16` are combined in `f32` and rounded once, to nearest even, after division and
//!    postscale.
//! 3. A NaN in a result is always the positive quiet NaN without payload, and combining two values
//!    is commutative in every bit: neither the instruction set nor the order of two peers shows.
//! 4. An instruction set changes how many elements go at once, never what is computed for one.
#![expect(
    unsafe_code,
    reason = "kernels read and write memory that other ranks share, with SIMD chosen at run time"
)]

use crate::{DType, ReduceOp, Reduction};
use half::{bf16, f16};
use std::hint::select_unpredictable;
use std::mem::transmute;
use std::sync::atomic::{AtomicU8, Ordering, compiler_fence};

/// What to do besides combining.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Steps {
    /// How two elements become one.
    pub op: ReduceOp,
    /// Factor on every input; 1 is free.
    pub prescale: f64,
    /// Divisor of the result: the number of ranks at the end of a mean; 1 is free.
    pub divide_by: usize,
    /// Factor on the result after the division; 1 is free.
    pub postscale: f64,
}

impl Steps {
    /// Everything that `reduction` asks for among `ranks` ranks.
    pub(crate) fn whole(reduction: Reduction, ranks: usize) -> Self {
        let Reduction { op, prescale, postscale } = reduction;
        Self { op, prescale, divide_by: if op == ReduceOp::Mean { ranks } else { 1 }, postscale }
    }

    /// Only combining: a mean of numbers is their sum so far, and [`finish`] divides it.
    pub(crate) fn combine(op: ReduceOp) -> Self {
        Self { op, prescale: 1.0, divide_by: 1, postscale: 1.0 }
    }
}

/// Writes to every destination the combination of all sources, in their order.
///
/// # Safety
/// Every pointer is valid for `len` elements of `dtype` and aligned for it. A destination may be
/// equal to a source; otherwise no destination overlaps another range. Nobody else writes the
/// ranges meanwhile, or reads a destination.
pub(crate) unsafe fn reduce(
    dtype: DType,
    steps: &Steps,
    srcs: &[*const u8],
    dsts: &[*mut u8],
    len: usize,
) {
    match Level::known() {
        // SAFETY: the caller's contract; the machine has the level.
        Some(level) => unsafe { kernel(level, dtype, steps.op)(steps, srcs, dsts, len) },
        // SAFETY: the caller's contract.
        None => unsafe { reduce_first(dtype, steps, srcs, dsts, len) },
    }
}

/// The first call of a process finds out the level; in its own function, so that later calls need
/// no stack.
///
/// # Safety
/// As [`reduce`].
#[cold]
#[inline(never)]
unsafe fn reduce_first(
    dtype: DType,
    steps: &Steps,
    srcs: &[*const u8],
    dsts: &[*mut u8],
    len: usize,
) {
    let level = Level::detect();
    LEVEL.store(level as u8, Ordering::Relaxed);
    // SAFETY: the caller's contract; the machine has the level.
    unsafe { kernel(level, dtype, steps.op)(steps, srcs, dsts, len) }
}

/// Multiplies `buffer` by `factor` in place.
///
/// # Safety
/// As [`reduce`] with `buffer` as the only source and destination.
pub(crate) unsafe fn prescale(dtype: DType, factor: f64, buffer: *mut u8, len: usize) {
    if factor != 1.0 {
        let steps = Steps { prescale: factor, ..Steps::combine(ReduceOp::Sum) };
        // SAFETY: the caller's contract.
        unsafe { reduce(dtype, &steps, &[buffer.cast_const()], &[buffer], len) }
    }
}

/// Divides and postscales `buffer` in place, as `steps` say.
///
/// # Safety
/// As [`reduce`] with `buffer` as the only source and destination.
pub(crate) unsafe fn finish(dtype: DType, steps: &Steps, buffer: *mut u8, len: usize) {
    if steps.divide_by > 1 || steps.postscale != 1.0 {
        let steps = Steps { prescale: 1.0, ..*steps };
        // SAFETY: the caller's contract.
        unsafe { reduce(dtype, &steps, &[buffer.cast_const()], &[buffer], len) }
    }
}

/// Makes every byte 0 or 1, so that memory that came from elsewhere is a valid `bool`.
///
/// # Safety
/// As [`reduce`] with `buffer` as the only source and destination.
pub(crate) unsafe fn canonical_bool(buffer: *mut u8, len: usize) {
    let steps = Steps::combine(ReduceOp::Max);
    // SAFETY: the caller's contract.
    unsafe { reduce(DType::Bool, &steps, &[buffer.cast_const()], &[buffer], len) }
}

/// Copies what another core reads next.
///
/// A staging buffer was read by its peers the last time around. Stores through the cache would have to take every
/// line back from them, one after the other; stores past it do not, and are several times faster from a page on.
///
/// # Safety
/// `from` is valid for reads of `bytes`, `to` for writes, and they do not overlap.
pub(crate) unsafe fn hand_over(from: *const u8, to: *mut u8, bytes: usize) {
    // SAFETY: the caller's contract.
    unsafe {
        match bytes {
            ..=4096 => std::ptr::copy_nonoverlapping(from, to, bytes),
            _ => copy_lines::<false, true>(from, to, bytes),
        }
    }
}

/// Copies what another core wrote last, out of memory that this core writes next: lines are fetched to be owned at
/// once, so that the writes need not ask for them again.
///
/// # Safety
/// `from` is valid for reads and writes of `bytes`, `to` for writes, and they do not overlap.
pub(crate) unsafe fn take_over(from: *const u8, to: *mut u8, bytes: usize) {
    // SAFETY: the caller's contract.
    unsafe { copy_lines::<true, false>(from, to, bytes) }
}

/// The same to memory that has left this core's cache: stores past it need not read what is there first.
///
/// # Safety
/// As [`take_over`].
pub(crate) unsafe fn take_far(from: *const u8, to: *mut u8, bytes: usize) {
    // SAFETY: the caller's contract.
    unsafe { copy_lines::<true, true>(from, to, bytes) }
}

/// Copies line by line: out of lines that are fetched to be `OWNED`, with stores `PAST` the cache.
///
/// # Safety
/// As [`take_over`], or [`hand_over`] if the lines need not be owned.
unsafe fn copy_lines<const OWNED: bool, const PAST: bool>(
    from: *const u8,
    to: *mut u8,
    bytes: usize,
) {
    // Up to where whole lines are written.
    let mut done = (to.addr().next_multiple_of(64) - to.addr()).min(bytes);
    // SAFETY: less than a line of both.
    unsafe { std::ptr::copy_nonoverlapping(from, to, done) };
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::{
            __m128i, _MM_HINT_ET0, _mm_loadu_si128, _mm_prefetch, _mm_sfence, _mm_storeu_si128,
            _mm_stream_si128,
        };
        const AHEAD: usize = 1024;
        while done + 64 <= bytes {
            // SAFETY: 64 bytes are left on both sides, and `to` is aligned there; a prefetch may name any address.
            // SSE2 is part of the architecture.
            unsafe {
                if OWNED {
                    _mm_prefetch::<_MM_HINT_ET0>(from.wrapping_add(done + AHEAD).cast());
                }
                let line: [__m128i; 4] = std::array::from_fn(|part| {
                    _mm_loadu_si128(from.add(done).cast::<__m128i>().add(part))
                });
                for (part, value) in line.into_iter().enumerate() {
                    let to = to.add(done).cast::<__m128i>().add(part);
                    if PAST { _mm_stream_si128(to, value) } else { _mm_storeu_si128(to, value) }
                }
            }
            done += 64;
        }
        if PAST {
            // Such stores are not ordered with the store that publishes them.
            // SAFETY: SSE is part of the architecture.
            unsafe { _mm_sfence() };
        }
    }
    // SAFETY: what is left of both.
    unsafe { std::ptr::copy_nonoverlapping(from.add(done), to.add(done), bytes - done) };
}

/// One kernel: an instruction set, an element type and an operation.
type Kernel = unsafe fn(&Steps, &[*const u8], &[*mut u8], usize);

/// An instruction set, chosen at run time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
enum Level {
    /// What every machine of this architecture has.
    Portable = 1,
    #[cfg(target_arch = "x86_64")]
    Avx2 = 2,
    #[cfg(target_arch = "x86_64")]
    Avx512 = 3,
}

/// The code of this machine's best level; 0 until the first call.
static LEVEL: AtomicU8 = AtomicU8::new(0);

impl Level {
    #[inline(always)]
    fn known() -> Option<Self> {
        match LEVEL.load(Ordering::Relaxed) {
            1 => Some(Self::Portable),
            #[cfg(target_arch = "x86_64")]
            2 => Some(Self::Avx2),
            #[cfg(target_arch = "x86_64")]
            3 => Some(Self::Avx512),
            _ => None,
        }
    }

    /// The best level of this machine.
    fn detect() -> Self {
        #[cfg(target_arch = "x86_64")]
        if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("f16c") {
            let wider = is_x86_feature_detected!("avx512f")
                && is_x86_feature_detected!("avx512bw")
                && is_x86_feature_detected!("avx512vl");
            return if wider { Self::Avx512 } else { Self::Avx2 };
        }
        Self::Portable
    }
}

#[inline]
fn kernel(level: Level, dtype: DType, op: ReduceOp) -> Kernel {
    match level {
        Level::Portable => of_dtype::<Portable, f16>(dtype, op),
        #[cfg(target_arch = "x86_64")]
        Level::Avx2 => of_dtype::<x86::Avx2, x86::F16>(dtype, op),
        #[cfg(target_arch = "x86_64")]
        Level::Avx512 => of_dtype::<x86::Avx512, x86::F16>(dtype, op),
    }
}

/// Picks a kernel; the compiler makes three table look-ups of it.
///
/// The last two parameters of a lane are its block lengths: long ones are 256 bytes of numbers,
/// four to eight registers; short ones serve what is less than a long one.
#[inline(always)]
fn of_dtype<S: InstructionSet, Half: Lane<Number = f32>>(dtype: DType, op: ReduceOp) -> Kernel {
    match dtype {
        DType::Bool => match op {
            // The mean of truth values is true where all are.
            ReduceOp::Mean => of_op::<S, Bool, 256, 16>(ReduceOp::Min),
            _ => of_op::<S, Bool, 256, 16>(op),
        },
        DType::U8 => of_op::<S, u8, 256, 16>(op),
        DType::I8 => of_op::<S, i8, 256, 16>(op),
        DType::I16 => of_op::<S, i16, 128, 8>(op),
        DType::I32 => of_op::<S, i32, 64, 8>(op),
        DType::I64 => of_op::<S, i64, 32, 4>(op),
        DType::F16 => of_op::<S, Half, 64, 8>(op),
        DType::Bf16 => of_op::<S, bf16, 64, 8>(op),
        DType::F32 => of_op::<S, f32, 64, 8>(op),
        DType::F64 => of_op::<S, f64, 32, 4>(op),
    }
}

#[inline(always)]
fn of_op<S: InstructionSet, L: Lane, const B: usize, const M: usize>(op: ReduceOp) -> Kernel {
    match op {
        ReduceOp::Sum | ReduceOp::Mean => S::kernel::<L, Sum, B, M>(),
        ReduceOp::Min => S::kernel::<L, Min, B, M>(),
        ReduceOp::Max => S::kernel::<L, Max, B, M>(),
        ReduceOp::Product => S::kernel::<L, Product, B, M>(),
    }
}

trait InstructionSet {
    fn kernel<L: Lane, O: Combine, const B: usize, const M: usize>() -> Kernel;
}

struct Portable;

impl InstructionSet for Portable {
    #[inline(always)]
    fn kernel<L: Lane, O: Combine, const B: usize, const M: usize>() -> Kernel {
        portable::<L, O, B, M>
    }
}

/// # Safety
/// As [`reduce`], where the type is `L`.
unsafe fn portable<L: Lane, O: Combine, const B: usize, const M: usize>(
    steps: &Steps,
    srcs: &[*const u8],
    dsts: &[*mut u8],
    len: usize,
) {
    // SAFETY: the caller's contract.
    unsafe { body::<L, O, B, M>(portable::<L, O, B, M>, steps, srcs, dsts, len) }
}

/// One type of element in memory and the number it stands for.
trait Lane: Copy + Default {
    type Number: Number;

    /// Whether the number is the element itself, so that it may go back to memory between steps.
    const EXACT: bool = false;

    fn widen(self) -> Self::Number;
    fn narrow(number: Self::Number) -> Self;

    /// Overridden where an instruction converts several at once.
    #[inline(always)]
    fn widen_all<const B: usize>(lanes: [Self; B]) -> [Self::Number; B] {
        widen_each(lanes)
    }

    #[inline(always)]
    fn narrow_all<const B: usize>(numbers: [Self::Number; B]) -> [Self; B] {
        narrow_each(numbers)
    }
}

#[inline(always)]
fn widen_each<L: Lane, const B: usize>(lanes: [L; B]) -> [L::Number; B] {
    let mut numbers = [L::Number::default(); B];
    for i in 0..B {
        numbers[i] = lanes[i].widen();
    }
    numbers
}

#[inline(always)]
fn narrow_each<L: Lane, const B: usize>(numbers: [L::Number; B]) -> [L; B] {
    let mut lanes = [L::default(); B];
    for i in 0..B {
        lanes[i] = L::narrow(numbers[i]);
    }
    lanes
}

/// The type that elements are combined in.
trait Number: Copy + Default {
    type Factor: Copy;
    type Divisor: Copy;

    fn factor(factor: f64) -> Self::Factor;
    fn divisor(divisor: usize) -> Self::Divisor;
    fn scale(self, factor: Self::Factor) -> Self;
    fn divide(self, divisor: Self::Divisor) -> Self;
    fn sum(self, other: Self) -> Self;
    fn product(self, other: Self) -> Self;
    fn smaller(self, other: Self) -> Self;
    fn larger(self, other: Self) -> Self;
}

trait Combine {
    fn combine<N: Number>(one: N, other: N) -> N;
}

macro_rules! operations {
    ($($name:ident => $function:ident),+) => {$(
        struct $name;

        impl Combine for $name {
            #[inline(always)]
            fn combine<N: Number>(one: N, other: N) -> N {
                one.$function(other)
            }
        }
    )+};
}

operations!(Sum => sum, Product => product, Min => smaller, Max => larger);

macro_rules! floats {
    ($($float:ident),+) => {$(
        impl Lane for $float {
            type Number = Self;

            #[inline(always)]
            fn widen(self) -> Self {
                self
            }

            #[inline(always)]
            fn narrow(number: Self) -> Self {
                select_unpredictable(number.is_nan(), Self::NAN, number)
            }
        }

        impl Number for $float {
            type Factor = Self;
            type Divisor = Self;

            #[inline(always)]
            fn factor(factor: f64) -> Self {
                factor as Self
            }

            #[inline(always)]
            fn divisor(divisor: usize) -> Self {
                divisor as Self
            }

            #[inline(always)]
            fn scale(self, factor: Self) -> Self {
                self * factor
            }

            #[inline(always)]
            fn divide(self, divisor: Self) -> Self {
                self / divisor
            }

            #[inline(always)]
            fn sum(self, other: Self) -> Self {
                self + other
            }

            #[inline(always)]
            fn product(self, other: Self) -> Self {
                self * other
            }

            // Equal numbers differ in bits only when they are zeros of both signs: the signs
            // decide.
            #[inline(always)]
            fn smaller(self, other: Self) -> Self {
                let smaller = select_unpredictable(self < other || self.is_nan(), self, other);
                let signs = Self::from_bits(self.to_bits() | other.to_bits());
                select_unpredictable(self == other, signs, smaller)
            }

            #[inline(always)]
            fn larger(self, other: Self) -> Self {
                let larger = select_unpredictable(self > other || self.is_nan(), self, other);
                let signs = Self::from_bits(self.to_bits() & other.to_bits());
                select_unpredictable(self == other, signs, larger)
            }
        }
    )+};
}

floats!(f32, f64);

macro_rules! integers {
    ($($integer:ident divided as $divisor:ident to $quotient:ident),+ $(,)?) => {$(
        impl Lane for $integer {
            type Number = Self;

            const EXACT: bool = true;

            #[inline(always)]
            fn widen(self) -> Self {
                self
            }

            #[inline(always)]
            fn narrow(number: Self) -> Self {
                number
            }
        }

        impl Number for $integer {
            type Factor = f64;
            type Divisor = $divisor;

            #[inline(always)]
            fn factor(factor: f64) -> f64 {
                factor
            }

            #[inline(always)]
            fn divisor(divisor: usize) -> $divisor {
                divisor as $divisor
            }

            #[inline(always)]
            fn scale(self, factor: f64) -> Self {
                (self as f64 * factor) as Self
            }

            #[inline(always)]
            fn divide(self, divisor: $divisor) -> Self {
                (self as $divisor / divisor) as $quotient as Self
            }

            #[inline(always)]
            fn sum(self, other: Self) -> Self {
                self.wrapping_add(other)
            }

            #[inline(always)]
            fn product(self, other: Self) -> Self {
                self.wrapping_mul(other)
            }

            #[inline(always)]
            fn smaller(self, other: Self) -> Self {
                if self < other { self } else { other }
            }

            #[inline(always)]
            fn larger(self, other: Self) -> Self {
                if self > other { self } else { other }
            }
        }
    )+};
}

// Floats divide in vectors, and exactly: a quotient that is no integer is further from the next one
// than a float with so many more bits rounds. 64 bits leave no such float.
integers!(
    u8 divided as f32 to i32,
    i8 divided as f32 to i32,
    i16 divided as f32 to i32,
    i32 divided as f64 to i32,
    i64 divided as i64 to i64,
);

/// A truth value as it lies in memory that others wrote: zero is false, all else is true.
#[derive(Clone, Copy, Default)]
#[repr(transparent)]
struct Bool(u8);

/// A truth value: 0 or 1.
#[derive(Clone, Copy, Default)]
struct Truth(u8);

impl Lane for Bool {
    type Number = Truth;

    #[inline(always)]
    fn widen(self) -> Truth {
        Truth(u8::from(self.0 != 0))
    }

    #[inline(always)]
    fn narrow(number: Truth) -> Self {
        Self(number.0)
    }
}

impl Number for Truth {
    /// What true becomes; false stays false under any factor.
    type Factor = u8;
    type Divisor = ();

    #[inline(always)]
    fn factor(factor: f64) -> u8 {
        u8::from(factor as u8 != 0)
    }

    #[inline(always)]
    fn divisor(_: usize) {}

    #[inline(always)]
    fn scale(self, factor: u8) -> Self {
        Self(self.0 & factor)
    }

    #[inline(always)]
    fn divide(self, (): ()) -> Self {
        self
    }

    #[inline(always)]
    fn sum(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    #[inline(always)]
    fn product(self, other: Self) -> Self {
        Self(self.0 & other.0)
    }

    #[inline(always)]
    fn smaller(self, other: Self) -> Self {
        Self(self.0 & other.0)
    }

    #[inline(always)]
    fn larger(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }
}

impl Lane for bf16 {
    type Number = f32;

    #[inline(always)]
    fn widen(self) -> f32 {
        f32::from_bits(u32::from(self.to_bits()) << 16)
    }

    #[inline(always)]
    fn narrow(number: f32) -> Self {
        Self::from_bits((rounded_to_bf16(number) >> 16) as u16)
    }

    // Two neighbours are taken apart and put together inside a 32-bit word: in half the
    // instructions that widening each takes. The numbers of one half of all words come first, then
    // the others: no order matters between widening and narrowing.
    #[inline(always)]
    fn widen_all<const B: usize>(lanes: [Self; B]) -> [f32; B] {
        if !B.is_multiple_of(64) {
            return widen_each(lanes);
        }
        let mut numbers = [0.0; B];
        let (pairs, _) = lanes.as_chunks::<2>();
        let (ones, others) = numbers.split_at_mut(pairs.len());
        for ((pair, one), other) in pairs.iter().zip(ones).zip(others) {
            // SAFETY: both are four plain bytes.
            let word = unsafe { transmute::<[Self; 2], u32>(*pair) };
            *one = f32::from_bits(word << 16);
            *other = f32::from_bits(word & 0xffff_0000);
        }
        numbers
    }

    #[inline(always)]
    fn narrow_all<const B: usize>(numbers: [f32; B]) -> [Self; B] {
        if !B.is_multiple_of(64) {
            return narrow_each(numbers);
        }
        let mut lanes = [Self::ZERO; B];
        let (pairs, _) = lanes.as_chunks_mut::<2>();
        let (ones, others) = numbers.split_at(pairs.len());
        for ((pair, one), other) in pairs.iter_mut().zip(ones).zip(others) {
            let word = rounded_to_bf16(*one) >> 16 | rounded_to_bf16(*other) & 0xffff_0000;
            // SAFETY: both are four plain bytes.
            *pair = unsafe { transmute::<u32, [Self; 2]>(word) };
        }
        lanes
    }
}

/// The bits of `number`, of which the upper half is the nearest `bf16`.
#[inline(always)]
fn rounded_to_bf16(number: f32) -> u32 {
    let bits = number.to_bits();
    let rounded = bits.wrapping_add(0x7fff + (bits >> 16 & 1));
    select_unpredictable(number.is_nan(), f32::NAN.to_bits(), rounded)
}

/// Without branches, so that it vectorises: the conversions of `half` test the processor each time.
impl Lane for f16 {
    type Number = f32;

    #[inline(always)]
    fn widen(self) -> f32 {
        let bits = u32::from(self.to_bits());
        let magnitude = (bits & 0x7fff) << 13;
        // An exact product moves the exponent from bias 15 to bias 127 and normalises subnormals.
        let finite = f32::from_bits(magnitude) * f32::from_bits((127 + 127 - 15) << 23);
        let special = f32::from_bits(magnitude | 0x7f80_0000);
        let unsigned = select_unpredictable(magnitude >= 0x0f80_0000, special, finite);
        f32::from_bits(unsigned.to_bits() | (bits & 0x8000) << 16)
    }

    #[inline(always)]
    fn narrow(number: f32) -> Self {
        let bits = number.to_bits();
        let sign = (bits >> 16 & 0x8000) as u16;
        let magnitude = bits & 0x7fff_ffff;
        // Adding a half lets the adder round tiny ones to multiples of the smallest subnormal.
        let subnormal = (f32::from_bits(magnitude) + 0.5).to_bits().wrapping_sub(0.5f32.to_bits());
        let odd = magnitude >> 13 & 1;
        let normal = magnitude.wrapping_sub((127 - 15) << 23).wrapping_add(0xfff + odd) >> 13;
        let finite = select_unpredictable(magnitude < (127 - 14) << 23, subnormal, normal);
        // Everything from 65520 up rounds to infinity.
        let rounded = select_unpredictable(magnitude >= 0x477f_f000, 0x7c00, finite) as u16;
        let signed = sign | rounded;
        Self::from_bits(select_unpredictable(number.is_nan(), Self::NAN.to_bits(), signed))
    }
}

/// The optional steps, in the type that is combined in.
#[derive(Clone, Copy)]
struct Plan<N: Number> {
    prescale: Option<N::Factor>,
    divide: Option<N::Divisor>,
    postscale: Option<N::Factor>,
}

impl<N: Number> Plan<N> {
    const NOTHING: Self = Self { prescale: None, divide: None, postscale: None };

    #[inline(always)]
    fn new(steps: &Steps) -> Self {
        Self {
            prescale: (steps.prescale != 1.0).then(|| N::factor(steps.prescale)),
            divide: (steps.divide_by > 1).then(|| N::divisor(steps.divide_by)),
            postscale: (steps.postscale != 1.0).then(|| N::factor(steps.postscale)),
        }
    }

    // Loops, not `map`: the standard library's is not always inlined, and then no number stays in a
    // register.
    #[inline(always)]
    fn prepare(self, numbers: &mut [N]) {
        if let Some(factor) = self.prescale {
            for number in numbers {
                *number = number.scale(factor);
            }
        }
    }

    #[inline(always)]
    fn finish(self, numbers: &mut [N]) {
        if let Some(divisor) = self.divide {
            for number in &mut *numbers {
                *number = number.divide(divisor);
            }
        }
        if let Some(factor) = self.postscale {
            for number in numbers {
                *number = number.scale(factor);
            }
        }
    }
}

/// # Safety
/// As [`reduce`], where the type is `L`; the machine has the instructions of `L`; `kernel` is the
/// function that calls this.
#[inline(always)]
unsafe fn body<L: Lane, O: Combine, const B: usize, const M: usize>(
    kernel: Kernel,
    steps: &Steps,
    srcs: &[*const u8],
    dsts: &[*mut u8],
    len: usize,
) {
    let mut plan = Plan::<L::Number>::new(steps);
    if L::EXACT {
        if plan.prescale.is_some() || plan.divide.is_some() || plan.postscale.is_some() {
            // SAFETY: the caller's contract.
            return unsafe { step_by_step::<L::Number>(kernel, steps, srcs, dsts, len) };
        }
        plan = Plan::NOTHING;
    }
    // SAFETY: the caller's contract.
    unsafe {
        if len >= B {
            blocks::<L, O, B>(plan, srcs, dsts, len);
        } else if len >= M {
            blocks::<L, O, M>(plan, srcs, dsts, len);
        } else if len > 0 {
            blocks::<L, O, 1>(plan, srcs, dsts, len);
        }
    }
}

/// All elements, `B` at a time.
///
/// The last block ends with the last element and may overlap the one before. So that it sees no
/// result of that one where a destination is also a source, it is computed first and written last:
/// elements in both get the same bits twice.
///
/// # Safety
/// As [`body`], with `len >= B`.
#[inline(always)]
unsafe fn blocks<L: Lane, O: Combine, const B: usize>(
    plan: Plan<L::Number>,
    srcs: &[*const u8],
    dsts: &[*mut u8],
    len: usize,
) {
    // SAFETY: the caller's contract; every block lies within `len`.
    unsafe {
        let last = combined::<L, O, B>(plan, srcs, len - B);
        let mut at = 0;
        while at < len - B {
            store(combined::<L, O, B>(plan, srcs, at), dsts, at);
            at += B;
        }
        store(last, dsts, len - B);
    }
}

/// Scales and divides integers in passes of their own over pieces that stay in the first cache.
///
/// Inside the kernels these long conversions would be compiled for each operation and instruction
/// set, and keep numbers from staying in registers.
///
/// # Safety
/// As [`reduce`], where the type is `N`; `kernel` combines elements of `N` as `steps` say.
#[inline(never)]
unsafe fn step_by_step<N: Number>(
    kernel: Kernel,
    steps: &Steps,
    srcs: &[*const u8],
    dsts: &[*mut u8],
    len: usize,
) {
    const PIECE: usize = 128;
    let Some((first, rest)) = srcs.split_first() else { return };
    let plan = Plan::<N>::new(steps);
    let mut total = [N::default(); PIECE];
    let mut next = [N::default(); PIECE];
    for at in (0..len).step_by(PIECE) {
        let piece = Ord::min(len - at, PIECE);
        let (total, next) = (&mut total[..piece], &mut next[..piece]);
        // SAFETY: the caller's contract; each buffer holds `piece` elements.
        unsafe {
            total.as_mut_ptr().copy_from_nonoverlapping(first.cast::<N>().add(at), piece);
            plan.prepare(total);
            for src in rest {
                next.as_mut_ptr().copy_from_nonoverlapping(src.cast::<N>().add(at), piece);
                plan.prepare(next);
                let one = total.as_mut_ptr().cast::<u8>();
                let other = next.as_ptr().cast::<u8>();
                kernel(&Steps::combine(steps.op), &[one.cast_const(), other], &[one], piece);
            }
            plan.finish(total);
            for dst in dsts {
                dst.cast::<N>().add(at).copy_from_nonoverlapping(total.as_ptr(), piece);
            }
        }
    }
}

/// The results for elements `at..at + B`, which stay in registers meanwhile.
///
/// # Safety
/// As [`body`], with `at + B <= len`.
#[inline(always)]
unsafe fn combined<L: Lane, O: Combine, const B: usize>(
    plan: Plan<L::Number>,
    srcs: &[*const u8],
    at: usize,
) -> [L; B] {
    let Some((first, rest)) = srcs.split_first() else { return [L::default(); B] };
    // SAFETY: the caller's contract.
    let mut numbers = unsafe { load::<L, B>(plan, *first, at) };
    for src in rest {
        keep_as_loop();
        // SAFETY: the caller's contract.
        let others = unsafe { load::<L, B>(plan, *src, at) };
        for i in 0..B {
            numbers[i] = O::combine(numbers[i], others[i]);
        }
    }
    plan.finish(&mut numbers);
    L::narrow_all(numbers)
}

/// Keeps the compiler from vectorising a loop over sources or destinations instead of elements,
/// with gathers and scatters. It emits no instruction.
#[inline(always)]
fn keep_as_loop() {
    compiler_fence(Ordering::SeqCst);
}

/// # Safety
/// As [`body`], with `at + B <= len`.
#[inline(always)]
unsafe fn store<L: Lane, const B: usize>(lanes: [L; B], dsts: &[*mut u8], at: usize) {
    for dst in dsts {
        keep_as_loop();
        // SAFETY: the caller's contract.
        unsafe { dst.cast::<L>().add(at).cast::<[L; B]>().write(lanes) }
    }
}

/// # Safety
/// As [`combined`].
#[inline(always)]
unsafe fn load<L: Lane, const B: usize>(
    plan: Plan<L::Number>,
    src: *const u8,
    at: usize,
) -> [L::Number; B] {
    // SAFETY: the caller's contract.
    let lanes = unsafe { src.cast::<L>().add(at).cast::<[L; B]>().read() };
    let mut numbers = L::widen_all(lanes);
    plan.prepare(&mut numbers);
    numbers
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    //! The same body compiled for wider registers.

    use super::{Combine, InstructionSet, Kernel, Lane, Steps, body, narrow_each, widen_each};
    use half::f16;
    use std::arch::x86_64::{
        __m128i, __m256, _MM_FROUND_TO_NEAREST_INT, _mm256_cvtph_ps, _mm256_cvtps_ph,
    };
    use std::mem::transmute;

    pub(super) struct Avx2;
    pub(super) struct Avx512;

    impl InstructionSet for Avx2 {
        #[inline(always)]
        fn kernel<L: Lane, O: Combine, const B: usize, const M: usize>() -> Kernel {
            avx2::<L, O, B, M>
        }
    }

    impl InstructionSet for Avx512 {
        #[inline(always)]
        fn kernel<L: Lane, O: Combine, const B: usize, const M: usize>() -> Kernel {
            avx512::<L, O, B, M>
        }
    }

    /// # Safety
    /// As [`super::reduce`], where the type is `L`; the machine has the features.
    #[target_feature(enable = "avx2,f16c")]
    unsafe fn avx2<L: Lane, O: Combine, const B: usize, const M: usize>(
        steps: &Steps,
        srcs: &[*const u8],
        dsts: &[*mut u8],
        len: usize,
    ) {
        // SAFETY: the caller's contract.
        unsafe { body::<L, O, B, M>(avx2::<L, O, B, M>, steps, srcs, dsts, len) }
    }

    /// # Safety
    /// As [`super::reduce`], where the type is `L`; the machine has the features.
    #[target_feature(enable = "avx2,f16c,avx512f,avx512bw,avx512vl")]
    unsafe fn avx512<L: Lane, O: Combine, const B: usize, const M: usize>(
        steps: &Steps,
        srcs: &[*const u8],
        dsts: &[*mut u8],
        len: usize,
    ) {
        // SAFETY: the caller's contract.
        unsafe { body::<L, O, B, M>(avx512::<L, O, B, M>, steps, srcs, dsts, len) }
    }

    /// An `f16` that is converted by instructions, eight at a time; only for functions that enable
    /// them.
    #[derive(Clone, Copy, Default)]
    #[repr(transparent)]
    pub(super) struct F16(f16);

    impl Lane for F16 {
        type Number = f32;

        #[inline(always)]
        fn widen(self) -> f32 {
            self.0.widen()
        }

        #[inline(always)]
        fn narrow(number: f32) -> Self {
            Self(f16::narrow(number))
        }

        #[inline(always)]
        fn widen_all<const B: usize>(lanes: [Self; B]) -> [f32; B] {
            if !B.is_multiple_of(8) {
                return widen_each(lanes);
            }
            let mut numbers = [0.0; B];
            let (eights, _) = lanes.as_chunks::<8>();
            let (wide, _) = numbers.as_chunks_mut::<8>();
            for (numbers, lanes) in wide.iter_mut().zip(eights) {
                // SAFETY: all are plain memory of equal size; the machine has F16C, or this lane
                // would not be in use.
                unsafe {
                    let lanes = transmute::<[Self; 8], __m128i>(*lanes);
                    *numbers = transmute::<__m256, [f32; 8]>(_mm256_cvtph_ps(lanes));
                }
            }
            numbers
        }

        #[inline(always)]
        fn narrow_all<const B: usize>(mut numbers: [f32; B]) -> [Self; B] {
            if !B.is_multiple_of(8) {
                return narrow_each(numbers);
            }
            // Only for the NaNs: the instruction keeps a payload.
            for number in &mut numbers {
                *number = f32::narrow(*number);
            }
            let mut lanes = [Self(f16::ZERO); B];
            let (eights, _) = lanes.as_chunks_mut::<8>();
            let (wide, _) = numbers.as_chunks::<8>();
            for (lanes, numbers) in eights.iter_mut().zip(wide) {
                // SAFETY: as in `widen_all`.
                unsafe {
                    let numbers = transmute::<[f32; 8], __m256>(*numbers);
                    let narrow = _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(numbers);
                    *lanes = transmute::<__m128i, [Self; 8]>(narrow);
                }
            }
            lanes
        }
    }

    /// What the conversion instruction makes of `number`.
    #[cfg(test)]
    pub(super) fn narrow_eight(number: f32) -> f16 {
        F16::narrow_all([number; 8])[0].0
    }
}

#[cfg(test)]
mod tests;
