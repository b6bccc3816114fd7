import static java.util.Arrays.asList;

import java.io.File;
import java.time.Duration;
import java.util.ArrayList;
import java.util.List;
import java.util.Map;
import java.util.TreeMap;
import java.util.concurrent.ConcurrentHashMap;
import org.apache.flink.api.common.eventtime.SerializableTimestampAssigner;
import org.apache.flink.api.common.eventtime.Watermark;
import org.apache.flink.api.common.eventtime.WatermarkGenerator;
import org.apache.flink.api.common.eventtime.WatermarkOutput;
import org.apache.flink.api.common.eventtime.WatermarkStrategy;
import org.apache.flink.api.common.functions.AggregateFunction;
import org.apache.flink.api.common.state.ValueState;
import org.apache.flink.api.common.state.ValueStateDescriptor;
import org.apache.flink.api.common.typeinfo.TypeInformation;
import org.apache.flink.api.common.typeinfo.Types;
import org.apache.flink.cep.CEP;
import org.apache.flink.cep.PatternStream;
import org.apache.flink.cep.functions.PatternProcessFunction;
import org.apache.flink.cep.functions.TimedOutPartialMatchHandler;
import org.apache.flink.cep.nfa.aftermatch.AfterMatchSkipStrategy;
import org.apache.flink.cep.pattern.Pattern;
import org.apache.flink.cep.pattern.WithinType;
import org.apache.flink.cep.pattern.conditions.IterativeCondition;
import org.apache.flink.runtime.util.EnvironmentInformation;
import org.apache.flink.shaded.jackson2.com.fasterxml.jackson.databind.JsonNode;
import org.apache.flink.shaded.jackson2.com.fasterxml.jackson.databind.ObjectMapper;
import org.apache.flink.streaming.api.datastream.DataStream;
import org.apache.flink.streaming.api.datastream.KeyedStream;
import org.apache.flink.streaming.api.datastream.SingleOutputStreamOperator;
import org.apache.flink.streaming.api.datastream.WindowedStream;
import org.apache.flink.streaming.api.environment.StreamExecutionEnvironment;
import org.apache.flink.streaming.api.functions.KeyedProcessFunction;
import org.apache.flink.streaming.api.functions.ProcessFunction;
import org.apache.flink.streaming.api.functions.co.ProcessJoinFunction;
import org.apache.flink.streaming.api.functions.sink.v2.DiscardingSink;
import org.apache.flink.streaming.api.functions.windowing.ProcessWindowFunction;
import org.apache.flink.streaming.api.windowing.assigners.EventTimeSessionWindows;
import org.apache.flink.streaming.api.windowing.assigners.GlobalWindows;
import org.apache.flink.streaming.api.windowing.assigners.SlidingEventTimeWindows;
import org.apache.flink.streaming.api.windowing.assigners.TumblingEventTimeWindows;
import org.apache.flink.streaming.api.windowing.assigners.WindowAssigner;
import org.apache.flink.streaming.api.windowing.evictors.CountEvictor;
import org.apache.flink.streaming.api.windowing.evictors.DeltaEvictor;
import org.apache.flink.streaming.api.windowing.evictors.Evictor;
import org.apache.flink.streaming.api.windowing.evictors.TimeEvictor;
import org.apache.flink.streaming.api.windowing.triggers.ContinuousEventTimeTrigger;
import org.apache.flink.streaming.api.windowing.triggers.CountTrigger;
import org.apache.flink.streaming.api.windowing.triggers.DeltaTrigger;
import org.apache.flink.streaming.api.windowing.triggers.EventTimeTrigger;
import org.apache.flink.streaming.api.windowing.triggers.PurgingTrigger;
import org.apache.flink.streaming.api.windowing.triggers.Trigger;
import org.apache.flink.streaming.api.windowing.windows.TimeWindow;
import org.apache.flink.streaming.api.windowing.windows.Window;
import org.apache.flink.util.Collector;
import org.apache.flink.util.OutputTag;

/**
 * Runs scenarios through Flink's own operators. Arguments: a file of scenarios, a file for the answers.
 *
 * <p>A source sends the rows and marks of a scenario one by one; a mark is a watermark, at exactly
 * that place. At its end Flink sends the last watermark of all by itself.
 */
@SuppressWarnings({"unchecked", "rawtypes"})
public class FlinkRun {
    static final int AT_A_TIME = 40; // scenarios in one job, each with a source of its own
    static final ObjectMapper JSON = new ObjectMapper();
    static final Map<String, Map<String, List<JsonNode>>> ANSWERS = new ConcurrentHashMap<>();
    static final TypeInformation<Item> ITEM = Types.POJO(Item.class);

    public static class Item {
        public boolean mark;
        public String key;
        public long time;
        public String value;
        public int input;
    }

    public static void main(String[] args) throws Exception {
        List<JsonNode> scenarios = new ArrayList<>();
        JSON.readTree(new File(args[0])).forEach(scenarios::add);
        for (int at = 0; at < scenarios.size(); at += AT_A_TIME) {
            StreamExecutionEnvironment env = StreamExecutionEnvironment.createLocalEnvironment(1);
            for (JsonNode each : scenarios.subList(at, Math.min(at + AT_A_TIME, scenarios.size()))) {
                Map<String, List<JsonNode>> answer = new ConcurrentHashMap<>();
                answer.put("main", new ArrayList<>());
                ANSWERS.put(each.get("name").asText(), answer);
                build(env, each);
            }
            env.execute();
        }
        Map<String, Object> all = new TreeMap<>();
        all.put("flink", EnvironmentInformation.getVersion());
        Map<String, Object> answers = new TreeMap<>();
        ANSWERS.forEach((name, answer) -> answers.put(name, new TreeMap<>(answer)));
        all.put("answers", answers);
        JSON.writeValue(new File(args[1]), all);
    }

    static void build(StreamExecutionEnvironment env, JsonNode scenario) {
        String name = scenario.get("name").asText();
        JsonNode operator = scenario.get("operator");
        List<Item> items = new ArrayList<>();
        for (JsonNode event : scenario.get("events")) {
            Item item = new Item();
            item.mark = event.get(0).asText().equals("watermark");
            item.key = item.mark ? "" : event.get(1).asText();
            item.time = event.get(item.mark ? 1 : 2).asLong();
            item.value = item.mark ? "" : event.get(3).asText();
            item.input = event.size() > 4 ? event.get(4).asInt() : 0;
            items.add(item);
        }
        DataStream<Item> rows =
                env.fromData(items, ITEM)
                        .assignTimestampsAndWatermarks(
                                WatermarkStrategy.<Item>forGenerator(context -> new Marks())
                                        .withTimestampAssigner(
                                                (SerializableTimestampAssigner<Item>)
                                                        (item, before) -> item.time))
                        .filter(item -> !item.mark);
        KeyedStream<Item, String> keyed = rows.keyBy(item -> item.key, Types.STRING);
        switch (operator.get("kind").asText()) {
            case "window" -> window(name, keyed, operator);
            case "process" -> process(name, keyed);
            case "match" -> match(name, keyed, operator);
            case "join" -> join(name, keyed, operator);
            default -> throw new IllegalArgumentException(operator.toString());
        }
    }

    /** Sends a watermark for each mark, and none beside. */
    static class Marks implements WatermarkGenerator<Item> {
        @Override
        public void onEvent(Item item, long time, WatermarkOutput output) {
            if (item.mark) {
                output.emitWatermark(new Watermark(item.time));
            }
        }

        @Override
        public void onPeriodicEmit(WatermarkOutput output) {}
    }

    /** Notes what comes, in the order it comes. */
    static void keep(String name, String output, DataStream<String> stream) {
        stream.process(
                        new ProcessFunction<String, String>() {
                            @Override
                            public void processElement(String text, Context context, Collector<String> out)
                                    throws Exception {
                                ANSWERS.get(name)
                                        .computeIfAbsent(output, any -> new ArrayList<>())
                                        .add(JSON.readTree(text));
                            }
                        })
                .returns(Types.STRING)
                .sinkTo(new DiscardingSink<>());
    }

    static void keepItems(String name, String output, DataStream<Item> stream) {
        keep(
                name,
                output,
                stream.map(item -> text(item.key, item.time, item.value)).returns(Types.STRING));
    }

    static String text(Object... values) {
        try {
            return JSON.writeValueAsString(values);
        } catch (Exception error) {
            throw new RuntimeException(error);
        }
    }

    // Windows

    static void window(String name, KeyedStream<Item, String> keyed, JsonNode operator) {
        JsonNode spec = operator.get("windows");
        WindowedStream windowed;
        if (spec.get("kind").asText().equals("count")) {
            long size = spec.get("size").asLong();
            windowed =
                    spec.has("slide")
                            ? keyed.countWindow(size, spec.get("slide").asLong())
                            : keyed.countWindow(size);
        } else {
            windowed = keyed.window((WindowAssigner) assigner(spec));
        }
        if (operator.has("trigger")) {
            windowed = windowed.trigger(trigger(operator.get("trigger")));
        }
        if (operator.has("evictor")) {
            windowed = windowed.evictor(evictor(operator.get("evictor")));
        }
        OutputTag<Item> late = new OutputTag<>("late", ITEM);
        if (operator.has("lateness")) {
            windowed = windowed.allowedLateness(Duration.ofMillis(operator.get("lateness").asLong()));
        }
        if (operator.path("late").asBoolean()) {
            windowed = windowed.sideOutputLateData(late);
        }
        SingleOutputStreamOperator<String> result =
                switch (operator.get("result").asText()) {
                    case "rows" -> windowed.process(new Rows(false), Types.STRING);
                    case "states" -> windowed.process(new Rows(true), Types.STRING);
                    case "aggregate" ->
                            windowed.aggregate(
                                    new Statistics(),
                                    new Told(),
                                    Types.PRIMITIVE_ARRAY(Types.LONG),
                                    Types.PRIMITIVE_ARRAY(Types.LONG),
                                    Types.STRING);
                    default -> throw new IllegalArgumentException(operator.toString());
                };
        keep(name, "main", result);
        if (operator.path("late").asBoolean()) {
            keepItems(name, "late", result.getSideOutput(late));
        }
    }

    static WindowAssigner assigner(JsonNode spec) {
        return switch (spec.get("kind").asText()) {
            case "tumbling" -> TumblingEventTimeWindows.of(ms(spec, "size"), ms(spec, "offset"));
            case "sliding" ->
                    SlidingEventTimeWindows.of(ms(spec, "size"), ms(spec, "slide"), ms(spec, "offset"));
            case "session" -> EventTimeSessionWindows.withGap(ms(spec, "gap"));
            case "own gaps" ->
                    EventTimeSessionWindows.withDynamicGap(item -> Long.parseLong(((Item) item).value));
            case "global" -> GlobalWindows.create();
            default -> throw new IllegalArgumentException(spec.toString());
        };
    }

    static Duration ms(JsonNode spec, String field) {
        return Duration.ofMillis(spec.path(field).asLong());
    }

    static Trigger trigger(JsonNode spec) {
        return switch (spec.get("kind").asText()) {
            case "event" -> EventTimeTrigger.create();
            case "count" -> CountTrigger.of(spec.get("size").asLong());
            case "continuous" -> ContinuousEventTimeTrigger.of(ms(spec, "interval"));
            case "delta" ->
                    DeltaTrigger.of(
                            spec.get("threshold").asDouble(),
                            (before, item) -> number((Item) item) - number((Item) before),
                            ITEM.createSerializer(new org.apache.flink.api.common.serialization.SerializerConfigImpl()));
            case "purging" -> PurgingTrigger.of(trigger(spec.get("inner")));
            default -> throw new IllegalArgumentException(spec.toString());
        };
    }

    static Evictor evictor(JsonNode spec) {
        boolean after = spec.path("after").asBoolean();
        return switch (spec.get("kind").asText()) {
            case "count" -> CountEvictor.of(spec.get("size").asLong(), after);
            case "time" -> TimeEvictor.of(ms(spec, "size"), after);
            case "delta" ->
                    DeltaEvictor.of(
                            spec.get("threshold").asDouble(),
                            (item, last) -> Math.abs(number((Item) item) - number((Item) last)),
                            after);
            default -> throw new IllegalArgumentException(spec.toString());
        };
    }

    static long number(Item item) {
        return Long.parseLong(item.value);
    }

    static Object[] head(String key, Window window) {
        return window instanceof TimeWindow time
                ? new Object[] {key, time.getStart(), time.getEnd()}
                : new Object[] {key, null, null};
    }

    /** The key, the window, the rows; and how often the window and the key have fired. */
    static class Rows extends ProcessWindowFunction<Item, String, String, Window> {
        final boolean states;

        Rows(boolean states) {
            this.states = states;
        }

        @Override
        public void process(String key, Context context, Iterable<Item> items, Collector<String> out)
                throws Exception {
            List<Object> told = new ArrayList<>(asList(head(key, context.window())));
            List<Long> values = new ArrayList<>();
            items.forEach(item -> values.add(number(item)));
            told.add(values);
            told.add(context.currentWatermark());
            if (states) {
                for (var store : asList(context.windowState(), context.globalState())) {
                    ValueState<Long> fired = store.getState(new ValueStateDescriptor<>("fired", Types.LONG));
                    fired.update(fired.value() == null ? 1 : fired.value() + 1);
                    told.add(fired.value());
                }
            }
            out.collect(text(told.toArray()));
        }
    }

    /** Sum, number, least, greatest. */
    static class Statistics implements AggregateFunction<Item, long[], long[]> {
        @Override
        public long[] createAccumulator() {
            return new long[] {0, 0, Long.MAX_VALUE, Long.MIN_VALUE};
        }

        @Override
        public long[] add(Item item, long[] to) {
            long value = number(item);
            return merge(to, new long[] {value, 1, value, value});
        }

        @Override
        public long[] merge(long[] a, long[] b) {
            return new long[] {
                a[0] + b[0], a[1] + b[1], Math.min(a[2], b[2]), Math.max(a[3], b[3])
            };
        }

        @Override
        public long[] getResult(long[] accumulator) {
            return accumulator;
        }
    }

    static class Told extends ProcessWindowFunction<long[], String, String, Window> {
        @Override
        public void process(String key, Context context, Iterable<long[]> results, Collector<String> out) {
            List<Object> told = new ArrayList<>(asList(head(key, context.window())));
            told.add(results.iterator().next());
            told.add(context.currentWatermark());
            out.collect(text(told.toArray()));
        }
    }

    // Process functions

    static void process(String name, KeyedStream<Item, String> keyed) {
        OutputTag<String> side = new OutputTag<>("side", Types.STRING);
        SingleOutputStreamOperator<String> result =
                keyed.process(new Obeys(side)).returns(Types.STRING);
        keep(name, "main", result);
        keep(name, "side", result.getSideOutput(side));
    }

    /**
     * Does what the rows say, "set 10", "delete 10", "again 10" or "count", and tells of all it sees.
     * The times are after the row's. A timer of "again" is set twice more, 10 ms later each time.
     */
    static class Obeys extends KeyedProcessFunction<String, Item, String> {
        final OutputTag<String> side;
        ValueState<Long> count;
        ValueState<Long> again;

        Obeys(OutputTag<String> side) {
            this.side = side;
        }

        @Override
        public void open(org.apache.flink.api.common.functions.OpenContext context) {
            count = getRuntimeContext().getState(new ValueStateDescriptor<>("count", Types.LONG));
            again = getRuntimeContext().getState(new ValueStateDescriptor<>("again", Types.LONG));
        }

        @Override
        public void processElement(Item item, Context context, Collector<String> out)
                throws Exception {
            var timers = context.timerService();
            String[] words = item.value.split(" ");
            long time = words.length > 1 ? item.time + Long.parseLong(words[1]) : 0;
            count.update(count.value() == null ? 1 : count.value() + 1);
            switch (words[0]) {
                case "set" -> timers.registerEventTimeTimer(time);
                case "delete" -> timers.deleteEventTimeTimer(time);
                case "again" -> {
                    again.update(2L);
                    timers.registerEventTimeTimer(time);
                }
                default -> {
                    context.output(side, text(item.key, item.time, count.value()));
                    count.clear();
                }
            }
            out.collect(
                    text(item.key, "row", context.timestamp(), timers.currentWatermark(), count.value()));
        }

        @Override
        public void onTimer(long time, OnTimerContext context, Collector<String> out)
                throws Exception {
            var timers = context.timerService();
            out.collect(
                    text(context.getCurrentKey(), "timer", time, timers.currentWatermark(), count.value()));
            if (again.value() != null) {
                timers.registerEventTimeTimer(time + 10);
                again.update(again.value() > 1 ? again.value() - 1 : null);
            }
        }
    }

    // Joins

    static void join(String name, KeyedStream<Item, String> keyed, JsonNode operator) {
        var left = keyed.filter(item -> item.input == 0).keyBy(item -> item.key, Types.STRING);
        var right = keyed.filter(item -> item.input == 1).keyBy(item -> item.key, Types.STRING);
        var joined =
                left.intervalJoin(right)
                        .between(
                                Duration.ofMillis(operator.get("lower").asLong()),
                                Duration.ofMillis(operator.get("upper").asLong()));
        if (operator.path("lower_exclusive").asBoolean()) {
            joined = joined.lowerBoundExclusive();
        }
        if (operator.path("upper_exclusive").asBoolean()) {
            joined = joined.upperBoundExclusive();
        }
        keep(
                name,
                "main",
                joined.process(
                        new ProcessJoinFunction<Item, Item, String>() {
                            @Override
                            public void processElement(
                                    Item one, Item other, Context context, Collector<String> out) {
                                out.collect(
                                        text(
                                                one.key,
                                                one.value,
                                                other.value,
                                                context.getLeftTimestamp(),
                                                context.getRightTimestamp()));
                            }
                        },
                        Types.STRING));
    }

    // Patterns

    static void match(String name, KeyedStream<Item, String> keyed, JsonNode operator) {
        OutputTag<String> timedOut = new OutputTag<>("timed_out", Types.STRING);
        OutputTag<Item> late = new OutputTag<>("late", ITEM);
        SingleOutputStreamOperator<String> result;
        try {
            Pattern pattern = pattern(operator.get("stages"), skip(operator.get("skip")));
            if (operator.has("within")) {
                pattern = pattern.within(ms(operator, "within"));
            }
            PatternStream<Item> stream = CEP.pattern(keyed, pattern);
            result =
                    stream.inEventTime()
                            .sideOutputLateData(late)
                            .process(new Matches(timedOut), Types.STRING);
        } catch (RuntimeException error) { // the pattern is not allowed
            ANSWERS.get(name).put("refused", asList(JSON.valueToTree(error.toString())));
            return;
        }
        keep(name, "main", result);
        keep(name, "timed_out", result.getSideOutput(timedOut));
        keepItems(name, "late", result.getSideOutput(late));
    }

    static class Matches extends PatternProcessFunction<Item, String>
            implements TimedOutPartialMatchHandler<Item> {
        final OutputTag<String> timedOut;

        Matches(OutputTag<String> timedOut) {
            this.timedOut = timedOut;
        }

        @Override
        public void processMatch(Map<String, List<Item>> match, Context context, Collector<String> out) {
            out.collect(told(match, context));
        }

        @Override
        public void processTimedOutMatch(Map<String, List<Item>> match, Context context) {
            context.output(timedOut, told(match, context));
        }

        static String told(Map<String, List<Item>> match, Context context) {
            Map<String, List<String>> values = new TreeMap<>();
            match.forEach(
                    (stage, items) -> values.put(stage, items.stream().map(item -> item.value).toList()));
            String key = match.values().iterator().next().get(0).key;
            return text(key, values, context.timestamp());
        }
    }

    static AfterMatchSkipStrategy skip(JsonNode spec) {
        if (spec == null) {
            return AfterMatchSkipStrategy.noSkip();
        }
        return switch (spec.get(0).asText()) {
            case "next" -> AfterMatchSkipStrategy.skipToNext();
            case "past" -> AfterMatchSkipStrategy.skipPastLastEvent();
            case "first" -> AfterMatchSkipStrategy.skipToFirst(spec.get(1).asText());
            case "last" -> AfterMatchSkipStrategy.skipToLast(spec.get(1).asText());
            default -> throw new IllegalArgumentException(spec.toString());
        };
    }

    static Pattern pattern(JsonNode stages, AfterMatchSkipStrategy skip) {
        Pattern pattern = null;
        for (JsonNode stage : stages) {
            String name = stage.path("name").asText();
            Pattern group = stage.has("group") ? pattern(stage.get("group"), skip) : null;
            if (pattern == null) {
                pattern = group == null ? Pattern.begin(name, skip) : Pattern.begin(group, skip);
            } else {
                Pattern before = pattern;
                pattern =
                        switch (stage.get("how").asText()) {
                            case "next" -> group == null ? before.next(name) : before.next(group);
                            case "followed_by" ->
                                    group == null ? before.followedBy(name) : before.followedBy(group);
                            case "followed_by_any" ->
                                    group == null ? before.followedByAny(name) : before.followedByAny(group);
                            case "not_next" -> before.notNext(name);
                            case "not_followed_by" -> before.notFollowedBy(name);
                            default -> throw new IllegalArgumentException(stage.toString());
                        };
            }
            pattern = shaped(pattern, stage);
        }
        return pattern;
    }

    static Pattern shaped(Pattern pattern, JsonNode stage) {
        if (stage.has("is")) {
            pattern = pattern.where(new Fits(stage.get("is").asText(), stage.path("above").asText()));
        }
        if (stage.has("times")) {
            pattern = pattern.times(stage.get("times").get(0).asInt(), stage.get("times").get(1).asInt());
        }
        if (stage.has("more")) {
            pattern = pattern.timesOrMore(stage.get("more").asInt());
        }
        if (stage.has("until")) {
            pattern = pattern.until(new Fits(stage.get("until").asText(), ""));
        }
        if (stage.path("consecutive").asBoolean()) {
            pattern = pattern.consecutive();
        }
        if (stage.path("combinations").asBoolean()) {
            pattern = pattern.allowCombinations();
        }
        if (stage.path("greedy").asBoolean()) {
            pattern = pattern.greedy();
        }
        if (stage.path("optional").asBoolean()) {
            pattern = pattern.optional();
        }
        if (stage.has("gap")) {
            pattern = pattern.within(ms(stage, "gap"), WithinType.PREVIOUS_AND_CURRENT);
        }
        return pattern;
    }

    /** A row "b7" fits "ab", and is above "s" if its number is greater than every one of stage s. */
    static class Fits extends IterativeCondition<Item> {
        final String letters;
        final String above;

        Fits(String letters, String above) {
            this.letters = letters;
            this.above = above;
        }

        @Override
        public boolean filter(Item item, Context<Item> context) throws Exception {
            if (letters.indexOf(item.value.charAt(0)) < 0) {
                return false;
            }
            if (!above.isEmpty()) {
                for (Item earlier : context.getEventsForPattern(above)) {
                    if (number(item.value) <= number(earlier.value)) {
                        return false;
                    }
                }
            }
            return true;
        }

        static long number(String value) {
            return Long.parseLong(value.substring(1));
        }
    }
}
